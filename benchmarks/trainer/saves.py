"""A checkpoint of an 8B-class model on one GPU: the stall of its save, and its load and export beside the disk.

    python -m benchmarks.trainer.saves --folder /tmp/saves
    python -m benchmarks.trainer.saves --model moejob/tiny-moe --layers 2 --length 64 --probe-gb 0.1

Trains with the trainer's engine, saves with its checkpoint store in the background while it trains on, loads the
files into the same engine, and exports them as `moejob export` does. Without --layers the model has as many of its own
as the disk has room for. Prints a JSON line for each phase as soon as it is there, and one with all of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.trainer.disk_speed import disk_speed
from benchmarks.trainer.engines import Ranks, Started, loss, peak_gib, resources, stack, start_engine, synchronize
from moejob_api.contract.pod_environment import spec_text
from moejob_api.contract.pods import RunFile
from moejob_api.job import Spec
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.planner.memory import checkpoint_bytes, export_bytes
from moejob_trainer.checkpoint_export.run import read_stored_run
from moejob_trainer.checkpoint_export.run_export import ExportOptions, export_whole_model
from moejob_trainer.checkpoints import (
    CheckpointStore,
    FenceToken,
    PendingWrite,
    RunFolder,
    RunOwner,
    SavedCheckpoint,
    SaveRequest,
    SingleRank,
)
from moejob_trainer.checkpoints.adapter_compatibility import adapter_facts
from moejob_trainer.checkpoints.saving import background_writer
from moejob_trainer.conversion.templates import CONFIG_FILE
from moejob_trainer.megatron.state import StateFiles
from moejob_trainer.megatron.stored_shards import STATE_FORMAT
from moejob_trainer.model.parameters import model_parameters
from moejob_trainer.runtime.disk import sync_and_forget

WARM_STEPS, USUAL_STEPS = 3, 6
# Of the room on the disk, what is left alone.
SPARE_BYTES = 3 * 10**9
GIGA = 10**9


@dataclass(slots=True)
class SaveReport:
    """The phases that were measured, printed one by one."""

    about: Mapping[str, object]
    phases: dict[str, object] = field(default_factory=dict)

    def add(self, phase: str, **found: object) -> None:
        """Print what was found in a phase, and keep it."""
        self.phases[phase] = found
        print(json.dumps({"save": phase, **found}), flush=True)

    def end(self) -> None:
        """Print all of them."""
        print(json.dumps({"saves": dict(self.about), **self.phases}), flush=True)


@dataclass(frozen=True, slots=True)
class BenchWriter:
    """Writes the tensors, and beside them what an export reads: the job has neither data nor evaluations."""

    state: StateFiles
    spec: Spec

    def start_writing(self, folder: Path) -> PendingWrite:
        """Begin to write."""
        pending = self.state.start_writing(folder)
        facts = adapter_facts(self.spec, has_weights=False).model_dump(mode="json", by_alias=True)
        (folder / "run-state.json").write_text(json.dumps({"counters": self.state.counters(), "adapted": facts}))
        return pending


@dataclass(frozen=True, slots=True)
class Trained:
    """The engine of a job, what makes one step of it, and the seconds that this usually takes."""

    of_rank: Started
    step: Callable[[], float]
    usual: float


def main() -> None:
    """Measure, and print."""
    chosen = _arguments()
    ranks = Ranks.of_launch()
    ranks.join("only")
    with _folder(chosen.folder) as folder:
        layers = chosen.layers or _fitting(chosen, folder, ranks.device)
        _measure(chosen, layers, folder, ranks.device)
    ranks.part()


def _measure(chosen: argparse.Namespace, layers: int, folder: Path, device: torch.device) -> None:
    spec, config = _spec(chosen, device), _config(chosen.model, layers)
    report = SaveReport({**vars(chosen), "folder": str(folder), "layers": layers, **stack(device)})
    for files in (1, 4):
        report.add(f"disk, {files} files", **disk_speed(folder, int(chosen.probe_gb * GIGA), files).as_fields())
    of_rank = start_engine(config, spec, device)
    state = StateFiles(of_rank.engine, model_parameters(of_rank.model.shape), background_writer())
    state.prepare()
    step = _stepper(of_rank, chosen, device)
    _warm(step)
    # Beside the first steps, as in a run; those that are timed have the host to themselves.
    with _time_block() as waited:
        of_rank.engine.copies.wait_for_memory()
    report.add("memory taken", waitedSeconds=waited[0])
    usual = _usual(step)
    report.add("steps", medianSeconds=round(usual, 4), slowestSeconds=round(max(step() for _ in range(3)), 4))
    store = _store(folder, spec, BenchWriter(state, spec))
    trained = Trained(of_rank, step, usual)
    first = _save_checkpoint(report, store, trained, 1)
    # The disk has room for one of them.
    shutil.rmtree(folder / "checkpoints" / first.folder.name)
    saved = _save_checkpoint(report, store, trained, 2)
    _load_twice(report, state, folder / "checkpoints" / saved.folder.name, saved.size_bytes, device)
    report.add("memory", peakGiB=peak_gib(device))
    del of_rank, state, step, store, trained
    _export_model(report, folder, spec, config)
    report.end()


# --- phases ---------------------------------------------------------------------------------------------------------


def _stepper(of_rank: Started, chosen: argparse.Namespace, device: torch.device) -> Callable[[], float]:
    random = np.random.default_rng(1)
    batch = of_rank.batch([chosen.length] * (chosen.micro * chosen.accumulate), random)

    def step() -> float:
        synchronize(device)
        begun = time.perf_counter()
        of_rank.engine.update(batch, loss)
        synchronize(device)
        return time.perf_counter() - begun

    return step


def _warm(step: Callable[[], float]) -> None:
    for _ in range(WARM_STEPS):
        step()


def _usual(step: Callable[[], float]) -> float:
    return float(np.median([step() for _ in range(USUAL_STEPS)]))


def _save_checkpoint(report: SaveReport, store: CheckpointStore, trained: Trained, number: int) -> SavedCheckpoint:
    """Save in the background, and train until it is committed. Stall: all seconds above those of usual steps."""
    begun = time.perf_counter()
    expected = checkpoint_bytes(trained.of_rank.model.shape, trained.of_rank.spec)
    sizes = {name: int(size) for name, size in asdict(trained.of_rank.sizes).items()}
    store.save(SaveRequest(number, STATE_FORMAT, sizes, {"torch": torch.__version__}, {"steps": number}), expected)
    call_seconds = time.perf_counter() - begun
    steps = []
    while store.last_saved is None or store.last_saved.folder.step != number:
        steps.append(trained.step())
        store.poll()
    whole, saved = time.perf_counter() - begun, store.last_saved
    report.add(
        f"save {number}",
        bytes=saved.size_bytes,
        callSeconds=round(call_seconds, 3),
        stallSeconds=round(whole - len(steps) * trained.usual, 3),
        storeStalledSeconds=round(saved.stalled_seconds, 3),
        slowerStepsSeconds=round(sum(steps) - len(steps) * trained.usual, 3),
        slowestStepSeconds=round(max(steps), 4),
        stepsMeanwhile=len(steps),
        committedSeconds=round(saved.seconds, 2),
        GBps=round(saved.size_bytes / saved.seconds / GIGA, 2),
    )
    return saved


def _load_twice(report: SaveReport, state: StateFiles, checkpoint: Path, size_bytes: int, device: torch.device) -> None:
    """Load twice: from the disk, as far as the kernel forgets files, and from its memory."""
    for path in checkpoint.iterdir():
        sync_and_forget(path)
    for where in ("disk", "memory"):
        with _time_block() as seconds:
            state.read(checkpoint, weights_only=False)
            synchronize(device)
        report.add(f"load from {where}", seconds=seconds[0], GBps=round(size_bytes / seconds[0] / GIGA, 2))


def _export_model(report: SaveReport, folder: Path, spec: Spec, config: Mapping[str, object]) -> None:
    """Verify the checkpoint as an export does, and write the model from it."""
    (folder / RunFile.TEMPLATE).mkdir()
    (folder / RunFile.TEMPLATE / CONFIG_FILE).write_text(json.dumps(config))
    (folder / RunFile.SPEC).write_text(spec_text(spec))
    for path in (folder / "checkpoints").glob("step-*/*"):
        sync_and_forget(path)
    with _time_block() as verified:
        run = read_stored_run(folder)
    read_bytes = run.checkpoint.manifest.size_bytes
    report.add("verify", seconds=verified[0], GBps=round(read_bytes / verified[0] / GIGA, 2))
    for path in run.checkpoint.path.iterdir():
        sync_and_forget(path)
    with _time_block() as exported:
        written = export_whole_model(run, ExportOptions(folder / "export"))
    report.add("export", bytes=written.bytes, seconds=exported[0], GBps=round(written.bytes / exported[0] / GIGA, 2))


@contextmanager
def _time_block() -> Iterator[list[float]]:
    seconds: list[float] = []
    begun = time.perf_counter()
    yield seconds
    seconds.append(round(time.perf_counter() - begun, 3))


# --- the job ---------------------------------------------------------------------------------------------------------


@contextmanager
def _folder(named: Path | None) -> Iterator[Path]:
    """Yield an empty folder, which is removed with all that is in it."""
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="saves-", dir=named))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fitting(chosen: argparse.Namespace, folder: Path, device: torch.device) -> int:
    """Return the layers of the largest model whose checkpoint and export the disk has room for."""
    spec, room = _spec(chosen, device), shutil.disk_usage(folder).free - SPARE_BYTES
    whole = len(shape_of(_config(chosen.model, None), chosen.model).layers)
    for layers in range(whole, 0, -1):
        shape = shape_of(_config(chosen.model, layers), chosen.model)
        needed = checkpoint_bytes(shape, spec) + export_bytes(shape, spec)
        if needed <= room:
            print(f"{layers} of {whole} layers, {needed:,} of {room:,} bytes", file=sys.stderr, flush=True)
            return layers
    raise ValueError(f"{folder} has {room:,} bytes of room, too few for one layer of {chosen.model}; name another")


def _config(model: str, layers: int | None) -> dict[str, object]:
    config = dict(catalog.find_config(model) or {})
    return config if layers is None else config | {"num_hidden_layers": layers}


def _store(folder: Path, spec: Spec, writer: BenchWriter) -> CheckpointStore:
    place = RunFolder(folder, RunOwner(job="saves", uid="saves"), FenceToken(1, 0), lambda: True)
    store = CheckpointStore(place, spec.checkpoint, SingleRank(), writer)
    store.start()
    return store


def _spec(chosen: argparse.Namespace, device: torch.device) -> Spec:
    return Spec.model_validate_json(
        json.dumps(
            {
                "method": "SFT",
                "model": {"source": chosen.model, "dtype": "bfloat16"},
                "data": {"train": [{"source": "/none.jsonl", "format": "Text"}], "maxLength": chosen.length},
                "training": {
                    "maxSteps": 1000,
                    "globalBatchSize": chosen.micro * chosen.accumulate,
                    "microBatchSize": chosen.micro,
                    "precision": {"gradients": "bfloat16", "moments": "bfloat16"},
                },
                "storage": {"size": "1Gi"},
                "resources": resources(device),
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--layers", type=int, help="of the model; as many as there is room for without")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the place of temporary files without")
    parser.add_argument("--probe-gb", type=float, default=4.0, help="gigabytes to measure the disk by itself with")
    for name, default in (("length", 4096), ("micro", 2), ("accumulate", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
