"""The model that is trained beside the published one, which Transformers computes: a fixed text goes through both.

Every layer is compared on what went into it here, so that a difference is found where it arises, and so that the ranks
of a run share the reading: on every node, one rank of each pipeline stage takes its share of the stage's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moejob_api.arithmetic import round_up
from moejob_api.layout.sizes import Layout
from moejob_trainer.batches import Document, MicroBatch, batch_plan, global_batch
from moejob_trainer.conversion.groups import shared
from moejob_trainer.engine import TokenOutputs
from moejob_trainer.groups import Groups, gathered_alike
from moejob_trainer.megatron.engine import MegatronEngine
from moejob_trainer.megatron.pipeline import whole
from moejob_trainer.model.mixture import Mixture
from moejob_trainer.model.stage import Stage
from moejob_trainer.probe.closeness import Comparison, bound_of, of_logits, of_states
from moejob_trainer.probe.reference import Reference

_TOKENS = 64
# No multiple of any size of a model: neighbours are far apart in the vocabulary.
_STRIDE = 7919
_NAMED = 3
_EMBEDDING, _LOGITS = "the embedding", "the logits"


@dataclass(frozen=True, slots=True)
class Findings:
    """Where two models differ."""

    differences: Sequence[Comparison]

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        more = len(self.differences) - _NAMED
        named = "; ".join(map(str, self.differences[:_NAMED]))
        return f"computes something else than Transformers: {named}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads for a stage: one rank on each node. `mine` is this rank's number among them, None where it is none."""

    mine: int | None
    count: int

    def is_mine(self, layer: int) -> bool:
        """Whether this rank compares a layer."""
        return self.mine is not None and layer % self.count == self.mine


@dataclass(frozen=True, slots=True, eq=False)
class _Heard:
    """What this rank's stages make of the text: into and out of each layer, and what the model says in the end."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    said: TokenOutputs


def differences(engine: MegatronEngine, layout: Layout, node: int, reference: Callable[[], Reference]) -> Findings:
    """Where the model differs from a reference, which is made only on ranks that read. All ranks call it together."""
    readers = _readers(engine, node)
    batches = _text(engine, layout)
    heard = _heard(engine, batches)
    mine = () if readers.mine is None else _compared(engine, reference(), heard, batches[0], readers)
    everyones = [found for of_rank in shared([*mine], engine.placement.control) for found in of_rank]
    layers = map(_layer, range(len(engine.model.shape.layers)))
    # A part that nobody looked at would be found right.
    if missed := {_EMBEDDING, *layers, _LOGITS} - {found.part for found in everyones}:
        raise RuntimeError(f"{', '.join(sorted(missed))}: not compared with Transformers")
    return Findings([found for found in everyones if found.differs])


def _readers(engine: MegatronEngine, node: int) -> Readers:
    stage, rank = engine.groups.pipeline.rank, engine.placement.model_groups.rank
    places = shared((stage, node), engine.placement.control)
    firsts = [first for first, place in enumerate(places) if place[0] == stage and places.index(place) == first]
    return Readers(firsts.index(rank) if rank in firsts else None, len(firsts))


def _compared(
    engine: MegatronEngine, reference: Reference, heard: _Heard, batch: MicroBatch, readers: Readers
) -> Iterator[Comparison]:
    bound, group = bound_of(reference.dtype), engine.groups.pipeline
    tokens, labels = batch.tokens[:_TOKENS], batch.labels[: _TOKENS - 1]
    last = len(engine.model.shape.layers) - 1
    mine = {index: states for index, states in heard.layers.items() if readers.is_mine(index)}
    if 0 in mine:
        embedded = mine[0][0]
        yield of_states(_EMBEDDING, embedded, reference.embedded(tokens), torch.zeros_like(embedded), bound)
    theirs = reference.layers({index: before for index, (before, _) in mine.items()})
    for index, (before, ours) in mine.items():
        yield of_states(_layer(index), ours, theirs[index], before, bound)
    if last in mine and group.rank == group.size - 1:
        said = heard.said.log_probabilities[: _TOKENS - 1], heard.said.entropy[: _TOKENS - 1]
        yield of_logits(_LOGITS, said, reference.logits(mine[last][1])[:-1], labels, bound)


def _layer(index: int) -> str:
    return f"layer {index}"


def _text(engine: MegatronEngine, layout: Layout) -> list[MicroBatch]:
    """The same few tokens for every data rank, as often as the schedule wants micro batches."""
    plan = batch_plan(engine.spec, layout, pad_token=0)
    alone = replace(plan, data=1, tokens=round_up(_TOKENS, plan.multiple))
    tokens = np.arange(1, _TOKENS + 1) * _STRIDE % engine.model.shape.vocabulary
    document = Document(tokens, np.ones(_TOKENS, np.float32), id=0)
    return global_batch([document] * plan.count_multiple, alone)[0]


def _heard(engine: MegatronEngine, batches: Sequence[MicroBatch]) -> _Heard:
    passed: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(index: int, _: nn.Module, given: Sequence[Any], made: Tensor) -> None:
        passed.setdefault(index, (given[0].detach(), made.detach()))

    with ExitStack() as stack:
        for stage in engine.stages:
            stack.enter_context(_complete(stage))
            for index, layer in stage.layers.items():
                stack.callback(layer.register_forward_hook(partial(keep, int(index))).remove)
        said = engine.outputs(batches)[0]
    sequence_parallel = engine.spec.parallelism.sequence_parallel
    rows = {
        index: tuple(_rows(state, engine.groups, sequence_parallel=sequence_parallel) for state in states)
        for index, states in sorted(passed.items())
    }
    return _Heard({index: (before, after) for index, (before, after) in rows.items()}, said)


def _rows(state: Tensor, groups: Groups, *, sequence_parallel: bool) -> Tensor:
    """The states of the whole text, of what each rank has. [t, h] -> [T, h]"""
    held = gathered_alike(state, groups.tensor) if sequence_parallel else state
    return whole(held, groups)[:_TOKENS].cpu()


@contextmanager
def _complete(stage: Stage) -> Iterator[None]:
    """No expert refuses a token: Transformers' never do."""
    mixtures = [module for module in stage.modules() if isinstance(module, Mixture)]
    settings = [mixture.settings for mixture in mixtures]
    for mixture, own in zip(mixtures, settings, strict=True):
        mixture.settings = replace(own, moe=own.moe.model_copy(update={"capacity_factor": None}))
    yield
    for mixture, own in zip(mixtures, settings, strict=True):
        mixture.settings = own
