"""Comparison of the trained model with Transformers' model of the published files, on a fixed text.

Both compute every layer from the same input, the trained model's: a difference is found in the layer that causes it,
and ranks can share the work. On every node one rank of each pipeline stage reads and compares its share of the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from moejob_api.arithmetic import round_up
from moejob_api.layout.sizes import Layout
from moejob_trainer.data.packing import batch_plan, global_batch
from moejob_trainer.distributed import messages
from moejob_trainer.distributed.collectives import all_gather_alike
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.pipeline import whole
from moejob_trainer.megatron.training_engine import MegatronEngine
from moejob_trainer.model.float8 import without_float8
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.stage import Stage
from moejob_trainer.model_check.reference import Reference
from moejob_trainer.model_check.tolerance import COPIED, Comparison, of_logits, of_states, tolerance_of
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
class Readers:
    """The ranks that read for a stage, one on each node. `mine` is this rank's number among them, if it is one."""

    mine: int | None
    count: int

    def is_mine(self, layer: int) -> bool:
        """Return whether this rank compares a layer."""
        return self.mine is not None and layer % self.count == self.mine


@dataclass(frozen=True, slots=True, eq=False)
class _Activations:
    """Activations of this rank's stages: into and out of each layer, and the final outputs."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    # What the output layer gets; None but on the last stage, which may hold no layer.
    final: Tensor | None
    outputs: TokenOutputs


def differences(engine: MegatronEngine, layout: Layout, node: int, reference: Callable[[], Reference]) -> CheckReport:
    """Compare the model with a reference, which is made only on ranks that read. All ranks call it together."""
    readers = _readers(engine, node)
    batches = _text(engine, layout)
    activations = _activations(engine, batches)
    mine = () if readers.mine is None else _compared(engine, reference(), activations, batches[0], readers)
    control = engine.placement.control
    everyones = [found for of_rank in messages.all_gather([*mine], _COMPARISONS, control) for found in of_rank]
    layers = map(_layer, range(len(engine.model.shape.layers)))
    # Without this check a part that no rank compares would pass.
    if missed := {_EMBEDDING, *layers, _LOGITS} - {found.part for found in everyones}:
        raise RuntimeError(f"{', '.join(sorted(missed))}: not compared with Transformers")
    return CheckReport([found for found in everyones if found.differs])


def _readers(engine: MegatronEngine, node: int) -> Readers:
    stage, rank = engine.groups.pipeline.rank, engine.placement.model_groups.rank
    places = messages.all_gather((stage, node), _PLACE, engine.placement.control)
    firsts = [first for first, place in enumerate(places) if place[0] == stage and places.index(place) == first]
    return Readers(firsts.index(rank) if rank in firsts else None, len(firsts))


def _compared(
    engine: MegatronEngine, reference: Reference, activations: _Activations, batch: MicroBatch, readers: Readers
) -> Iterator[Comparison]:
    bound = tolerance_of(reference.dtype)
    tokens, labels = batch.tokens[:_TOKENS], batch.labels[: _TOKENS - 1]
    last = len(engine.model.shape.layers) - 1
    mine = {index: states for index, states in activations.layers.items() if readers.is_mine(index)}
    if 0 in mine:
        embedded = mine[0][0]
        yield of_states(_EMBEDDING, embedded, reference.embedded(tokens), torch.zeros_like(embedded), COPIED)
    theirs = reference.layers({index: before for index, (before, _) in mine.items()})
    for index, (before, ours) in mine.items():
        yield of_states(_layer(index), ours, theirs[index], before, bound)
    if activations.final is not None and readers.is_mine(last):
        outputs = activations.outputs.log_probabilities[: _TOKENS - 1], activations.outputs.entropy[: _TOKENS - 1]
        yield of_logits(_LOGITS, outputs, reference.logits(activations.final)[:-1], labels, bound)


def _layer(index: int) -> str:
    return f"layer {index}"


def _text(engine: MegatronEngine, layout: Layout) -> list[MicroBatch]:
    """The same few tokens for every data rank, as often as the schedule wants micro batches."""
    plan = batch_plan(engine.spec, layout, pad_token=0)
    alone = replace(plan, data=1, tokens=round_up(_TOKENS, plan.multiple))
    tokens = np.arange(1, _TOKENS + 1) * _STRIDE % engine.model.shape.vocabulary
    document = Document(tokens, np.ones(_TOKENS, np.float32), id=0)
    return global_batch([document] * plan.count_multiple, alone)[0]


def _activations(engine: MegatronEngine, batches: Sequence[MicroBatch]) -> _Activations:
    passed: dict[int, tuple[Tensor, Tensor]] = {}
    final: list[Tensor] = []

    def keep(index: int, _: nn.Module, given: Sequence[Any], made: Tensor) -> None:
        passed.setdefault(index, (given[0].detach(), made.detach()))

    def keep_final(_: nn.Module, given: Sequence[Any]) -> None:
        final.append(given[0].detach())

    with ExitStack() as stack:
        # Transformers computes logits: the temperature of GRPO's answers is no part of the model.
        stack.enter_context(engine.at_temperature(1.0))
        for stage in engine.stages:
            stack.enter_context(_complete(stage))
            stack.enter_context(without_float8(stage))
            for index, layer in stage.layers.items():
                stack.callback(layer.register_forward_hook(partial(keep, int(index))).remove)
            if stage.place.is_last:
                stack.callback(stage.final_norm.register_forward_pre_hook(keep_final).remove)
        outputs = engine.outputs(batches)[0]
    sequence_parallel = engine.spec.parallelism.sequence_parallel
    rows = partial(_rows, groups=engine.groups, sequence_parallel=sequence_parallel)
    layers = {index: (rows(before), rows(after)) for index, (before, after) in sorted(passed.items())}
    return _Activations(layers, rows(final[0]) if final else None, outputs)


def _rows(state: Tensor, *, groups: Groups, sequence_parallel: bool) -> Tensor:
    """The states of the whole text, of what each rank has. [t, h] -> [T, h]"""
    held = all_gather_alike(state, groups.tensor) if sequence_parallel else state
    return whole(held, groups)[:_TOKENS].cpu()


@contextmanager
def _complete(stage: Stage) -> Iterator[None]:
    """Remove the capacity of experts meanwhile: Transformers drops no token."""
    mixtures = [module for module in stage.modules() if isinstance(module, MoELayer)]
    settings = [moe.settings for moe in mixtures]
    for moe, own in zip(mixtures, settings, strict=True):
        moe.settings = replace(own, moe=own.moe.model_copy(update={"capacity_factor": None}))
    yield
    for moe, own in zip(mixtures, settings, strict=True):
        moe.settings = own
