"""Cells of the checkpoint matrix: a run saved in one layout resumes in another as if nothing had happened.

What lies in a checkpoint is read back here by other code than the trainer's: as whole tensors, in which each element
has to be there exactly once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.state import StateFiles
from moejob_trainer.megatron.topology import start_groups, stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from trainer.parity.cells import Cell, build_blank_engine, make_loss, micro_batches, start_engine

SAVED_AFTER = 2
STEPS = 4
WEIGHTS = "weight"

# Every tensor of a checkpoint, whole, by what it is and of which parameter.
State = Mapping[tuple[str, str], Tensor]


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint, and how the run went on that wrote it."""

    folder: Path
    counters: Mapping[str, int]
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Resumption:
    """The state to resume from, and the parts to forget on purpose."""

    saved: SavedRun
    again: Path
    weights_only: bool = False
    forgets_counters: bool = False


def train_and_save(cell: Cell, first: Path, folder: Path) -> SavedRun:
    """Train, save and continue; one rank's part."""
    use_cpu()
    engine = start_engine(cell, first)
    try:
        _train_steps(cell, engine, range(SAVED_AFTER))
        counters = _save(engine, folder)
        return SavedRun(folder, counters, _train_steps(cell, engine, range(SAVED_AFTER, STEPS)))
    finally:
        stop_groups()


def resume_runs(cell: Cell, first: Path, resumptions: Sequence[Resumption]) -> list[tuple[float, ...]]:
    """The losses after each checkpoint, by an engine of its own, which saves at once what it has read."""
    use_cpu()
    groups = start_groups(cell.layout(), cell.spec().moe.dispatcher)
    losses = []
    try:
        for resumption in resumptions:
            engine = build_blank_engine(cell, first, groups)
            _read(engine, resumption)
            _save(engine, resumption.again)
            losses.append(_train_steps(cell, engine, range(SAVED_AFTER, STEPS)))
    finally:
        stop_groups()
    return losses


def state_in(folder: Path) -> State:
    """Return the state in a folder, whole; an element that is missing or there twice is an error."""
    parts: dict[tuple[str, str], list[tuple[tuple[slice, ...], Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            for number, entry in enumerate(json.loads(opened.metadata()["boxes"])):
                at = tuple(slice(a, a + n) for a, n in zip(entry["start"], entry["size"], strict=True))
                parts.setdefault((entry["kind"], entry["name"]), []).append((at, opened.get_tensor(str(number))))
    return {key: _assemble_parts(key, of_one) for key, of_one in parts.items()}


def unequal_names(state: State, expected: State) -> list[tuple[str, str]]:
    """Return the names that differ in any bit or in type, or are there only once."""
    return [
        key
        for key in sorted({*state, *expected})
        if key not in state or key not in expected or not _is_same(state[key], expected[key])
    ]


def measure_distances(state: State, expected: State) -> Mapping[str, float]:
    """Return the distance of two states by kind, relative to the largest element of each tensor."""
    assert {*state} == {*expected}
    worst: dict[str, float] = {}
    for (kind, name), tensor in state.items():
        other = expected[kind, name].float()
        error = (tensor.float() - other).abs().max().item() / max(other.abs().max().item(), 1e-30)
        worst[kind] = max(worst.get(kind, 0.0), error)
    return worst


def _assemble_parts(key: tuple[str, str], parts: Sequence[tuple[tuple[slice, ...], Tensor]]) -> Tensor:
    axes = len(parts[0][0])
    shape = [max(at[axis].stop for at, _ in parts) for axis in range(axes)]
    whole, times = torch.zeros(shape, dtype=parts[0][1].dtype), torch.zeros(shape, dtype=torch.int)
    for at, part in parts:
        whole[at] = part
        times[at] += 1
    assert (times == 1).all(), f"{key} has elements that are written {sorted({*times.flatten().tolist()})} times"
    return whole


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _train_steps(cell: Cell, engine: MegatronTrainingEngine, steps: range) -> tuple[float, ...]:
    loss = make_loss(cell, engine)
    return tuple(engine.update(micro_batches(cell, engine, step), loss).loss for step in steps)


def _save(engine: MegatronTrainingEngine, folder: Path) -> Mapping[str, int]:
    folder.mkdir(parents=True, exist_ok=True)
    counters = _with_files(engine, lambda files: _written(files, folder))
    dist.barrier()
    return counters


def _written(files: StateFiles, folder: Path) -> Mapping[str, int]:
    pending = files.start_writing(folder)
    while not pending.is_finished():
        time.sleep(0.002)
    return files.counters()


def _read(engine: MegatronTrainingEngine, resumption: Resumption) -> None:
    def read(files: StateFiles) -> Mapping[str, int]:
        files.read(resumption.saved.folder, weights_only=resumption.weights_only)
        if not resumption.weights_only and not resumption.forgets_counters:
            files.set_counters(resumption.saved.counters)
        return files.counters()

    _with_files(engine, read)


def _with_files(engine: MegatronTrainingEngine, act: Callable[[StateFiles], Mapping[str, int]]) -> Mapping[str, int]:
    with ThreadPoolExecutor(1) as background:
        return act(StateFiles(engine, build_tensor_table(engine.model.shape).parameters, background))
