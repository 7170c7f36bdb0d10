"""Comparison of the trained model with Transformers' model of the published files, on a fixed text.

Both compute every layer from the same input, the trained model's: a difference is found in the layer that causes it,
and ranks can share the work. On every node one rank of each pipeline stage reads and compares its share of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from moejob_api.arithmetic import round_up
from moejob_api.layout.sizes import Layout
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.distributed import messages
from moejob_trainer.distributed.collectives import all_gather_alike
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.pipeline import gather_row_values
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.model.float8 import without_float8
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.stage import ModelStage
from moejob_trainer.model_check.reference import ReferenceModel
from moejob_trainer.model_check.tolerance import COPIED, Comparison, compare_logits, compare_states, find_tolerance
from moejob_trainer.training import Document, MicroBatch, TokenOutputs

_TOKENS = 64
# A prime: tokens i * 7919 mod V differ, and neighbours are far apart in the vocabulary.
_STRIDE = 7919
_NAMED = 3
_EMBEDDING, _LOGITS = "the embedding", "the logits"
_COMPARISONS = TypeAdapter(list[Comparison])
# Pipeline stage and node of a rank.
_PLACE = TypeAdapter(tuple[int, int])


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The places where two models differ."""

    differences: Sequence[Comparison]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        more = len(self.differences) - _NAMED
        named = "; ".join(map(str, self.differences[:_NAMED]))
        return f"computes something else than Transformers: {named}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class ReferenceReaders:
    """The ranks that read for a stage, one on each node. `own_number` is this rank's, if it reads."""

    own_number: int | None
    count: int

    def is_mine(self, layer: int) -> bool:
        """Return whether this rank compares a layer."""
        return self.own_number is not None and layer % self.count == self.own_number


@dataclass(frozen=True, slots=True, eq=False)
class _Activations:
    """Activations of this rank's stages: into and out of each layer, and the final outputs."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    # What the output layer gets; None but on the last stage, which may hold no layer.
    final: Tensor | None
    outputs: TokenOutputs


def compare_models(
    engine: MegatronTrainingEngine, layout: Layout, node: int, make_reference: Callable[[], ReferenceModel]
) -> CheckReport:
    """Compare the model with a reference, which is made only on ranks that read. All ranks call it together."""
    readers = _choose_readers(engine, node)
    batches = _make_batches(engine, layout)
    activations = _record_activations(engine, batches)
    local_comparisons = (
        () if readers.own_number is None else _compare_parts(engine, make_reference(), activations, batches[0], readers)
    )
    control = engine.placement.control
    comparisons = [
        comparison
        for of_rank in messages.all_gather_values([*local_comparisons], _COMPARISONS, control)
        for comparison in of_rank
    ]
    layers = map(_layer_name, range(len(engine.model.shape.layers)))
    # Without this check a part that no rank compares would pass.
    if missing := {_EMBEDDING, *layers, _LOGITS} - {comparison.part for comparison in comparisons}:
        raise RuntimeError(f"{', '.join(sorted(missing))}: not compared with Transformers")
    return CheckReport([comparison for comparison in comparisons if comparison.is_different])


def _choose_readers(engine: MegatronTrainingEngine, node: int) -> ReferenceReaders:
    stage, rank = engine.groups.pipeline.rank, engine.placement.model_groups.rank
    places = messages.all_gather_values((stage, node), _PLACE, engine.placement.control)
    firsts = [first for first, place in enumerate(places) if place[0] == stage and places.index(place) == first]
    return ReferenceReaders(firsts.index(rank) if rank in firsts else None, len(firsts))


def _compare_parts(
    engine: MegatronTrainingEngine,
    reference: ReferenceModel,
    activations: _Activations,
    batch: MicroBatch,
    readers: ReferenceReaders,
) -> Iterator[Comparison]:
    bound = find_tolerance(reference.dtype)
    tokens, labels = batch.tokens[:_TOKENS], batch.labels[: _TOKENS - 1]
    last = len(engine.model.shape.layers) - 1
    own_layers = {index: states for index, states in activations.layers.items() if readers.is_mine(index)}
    if 0 in own_layers:
        embedded = own_layers[0][0]
        yield compare_states(_EMBEDDING, embedded, reference.embed_tokens(tokens), torch.zeros_like(embedded), COPIED)
    expected = reference.apply_layers({index: before for index, (before, _) in own_layers.items()})
    for index, (before, output) in own_layers.items():
        yield compare_states(_layer_name(index), output, expected[index], before, bound)
    if activations.final is not None and readers.is_mine(last):
        outputs = activations.outputs.log_probabilities[: _TOKENS - 1], activations.outputs.entropy[: _TOKENS - 1]
        yield compare_logits(_LOGITS, outputs, reference.compute_logits(activations.final)[:-1], labels, bound)


def _layer_name(index: int) -> str:
    return f"layer {index}"


def _make_batches(engine: MegatronTrainingEngine, layout: Layout) -> list[MicroBatch]:
    """The same few tokens for every data rank, as often as the schedule wants micro batches."""
    plan = batch_plan(engine.spec, layout, pad_token=0)
    alone = replace(plan, data=1, tokens=round_up(_TOKENS, plan.multiple))
    tokens = np.arange(1, _TOKENS + 1) * _STRIDE % engine.model.shape.vocabulary
    document = Document(tokens, np.ones(_TOKENS, np.float32), id=0)
    return build_global_batch([document] * plan.count_multiple, alone)[0]


def _record_activations(engine: MegatronTrainingEngine, batches: Sequence[MicroBatch]) -> _Activations:
    layer_states: dict[int, tuple[Tensor, Tensor]] = {}
    final: list[Tensor] = []

    def keep_layer(index: int, before: Tensor, after: Tensor) -> None:
        layer_states.setdefault(index, (before, after))

    with ExitStack() as stack:
        # Transformers computes logits: the temperature of GRPO's answers is no part of the model.
        stack.enter_context(engine.at_temperature(1.0))
        for stage in engine.stages:
            stack.enter_context(_without_capacity(stage))
            stack.enter_context(without_float8(stage))
            for handle in stage.watch_layers(keep_layer, final.append):
                stack.callback(handle.remove)
        outputs = engine.compute_outputs(batches)[0]
    sequence_parallel = engine.spec.parallelism.sequence_parallel
    rows = partial(_gather_rows, groups=engine.groups, sequence_parallel=sequence_parallel)
    layers = {index: (rows(before), rows(after)) for index, (before, after) in sorted(layer_states.items())}
    return _Activations(layers, rows(final[0]) if final else None, outputs)


def _gather_rows(state: Tensor, *, groups: Groups, sequence_parallel: bool) -> Tensor:
    """The states of the whole text, of what each rank has. [t, h] -> [T, h]"""
    gathered = all_gather_alike(state, groups.tensor) if sequence_parallel else state
    return gather_row_values(gathered, groups)[:_TOKENS].cpu()


@contextmanager
def _without_capacity(stage: ModelStage) -> Iterator[None]:
    """Remove the capacity of experts meanwhile: Transformers drops no token."""
    moe_layers = [module for module in stage.modules() if isinstance(module, MoELayer)]
    settings = [moe.settings for moe in moe_layers]
    for moe, layer_settings in zip(moe_layers, settings, strict=True):
        moe.settings = replace(layer_settings, moe=layer_settings.moe.model_copy(update={"capacity_factor": None}))
    yield
    for moe, layer_settings in zip(moe_layers, settings, strict=True):
        moe.settings = layer_settings
