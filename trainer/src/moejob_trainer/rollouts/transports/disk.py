"""Weights through a folder that ranks and engines share: a volume, or /dev/shm where all run on one machine.

Each rank writes the tensors it owns, in files of bounded size, before any engine is touched: a full volume leaves them
with the weights that they have. The files stay until the next publication, for engines that come back meanwhile.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.distributed import messages
from moejob_trainer.rollouts.fleet import RolloutEngine
from moejob_trainer.rollouts.publisher import TransferResult
from moejob_trainer.rollouts.sync import WeightSync
from moejob_trainer.rollouts.transports.checksums import tensor_checksums
from moejob_trainer.rollouts.wire import WeightsLabel

_BUCKET_BYTES = 256 * 1024**2


class NoDiskSpace(RuntimeError):
    """Weights cannot be written where engines would read them."""


@dataclass(frozen=True, slots=True)
class _WrittenFiles:
    """The files of one rank, or why there are none."""

    paths: tuple[str, ...]
    size_bytes: int
    # Of each file, the checksums of its tensors' pages.
    checksums: tuple[dict[str, list[int]], ...]
    problem: str | None = None


_WRITTEN_FILES = TypeAdapter(_WrittenFiles)


class DiskTransport:
    """Writes to `folder`, which engines see under the same name."""

    def __init__(self, folder: Path, world: ProcessGroup | None, start_seconds: float) -> None:
        self._folder, self._world, self._start_seconds = folder, world, start_seconds
        self._rank = 0 if world is None else world.rank()

    @property
    def stacked_elements(self) -> int:
        """Return 0: files have the names of tensors, one by one."""
        return 0

    def send(
        self, label: WeightsLabel, weights: Iterable[tuple[str, Tensor]], sync: WeightSync | None
    ) -> TransferResult:
        """Write all weights, then start an update on all engines and let them read the files. Collective."""
        label_folder = self._folder / str(label)
        if self._rank == 0:
            # Files of a trainer that was killed, also under this label.
            self._remove_files()
            label_folder.mkdir(parents=True)
        messages.wait_for_group(self._world)
        rank_files = messages.all_gather_values(
            _write_files(weights, label_folder, self._rank), _WRITTEN_FILES, self._world
        )
        problems = [files.problem for files in rank_files if files.problem is not None]
        if problems:
            self.close()
            raise NoDiskSpace(problems[0])
        size = sum(rank_file.size_bytes for rank_file in rank_files)
        if sync is None:
            return TransferResult((), size)
        update = {
            "paths": [path for rank_file in rank_files for path in rank_file.paths],
            "checksums": [file for rank_file in rank_files for file in rank_file.checksums],
        }
        return _load_engines(sync, update, size, self._start_seconds)

    def close(self) -> None:
        """Remove all files."""
        messages.wait_for_group(self._world)
        if self._rank == 0:
            self._remove_files()

    def _remove_files(self) -> None:
        for old_folder in self._folder.glob("*"):
            shutil.rmtree(old_folder, ignore_errors=True)


def _load_engines(sync: WeightSync, update: dict[str, Any], size_bytes: int, start_seconds: float) -> TransferResult:
    async def load_files(engine: RolloutEngine) -> None:
        await sync.update(engine, update)

    async def load_all() -> tuple[RolloutEngine, ...]:
        return await sync.run_on_each(await sync.start_update(start_seconds), load_files)

    return TransferResult(sync.run(load_all()), size_bytes, catch_up=load_files)


def _write_files(weights: Iterable[tuple[str, Tensor]], folder: Path, rank: int) -> _WrittenFiles:
    paths, checksums = list[str](), list[dict[str, list[int]]]()
    size, problem = 0, None
    for number, bucket in enumerate(tensor_buckets(weights, _BUCKET_BYTES)):
        size += sum(tensor.nbytes for tensor in bucket.values())
        if problem is None:
            path = folder / f"rank-{rank:05}-{number:05}.safetensors"
            problem = _save_bucket(bucket, path, size)
            paths.append(str(path))
            checksums.append({name: tensor_checksums(tensor) for name, tensor in bucket.items()})
    # The weights are read to their end even after a failure: other ranks need this rank in their collectives.
    return _WrittenFiles(tuple(paths), size, tuple(checksums), problem)


def _save_bucket(bucket: dict[str, Tensor], path: Path, size_bytes: int) -> str | None:
    try:
        save_file(bucket, path)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        return (
            f"{path.parent} has {free:,} bytes free and weights of {size_bytes:,} bytes do not fit ({error}); "
            "enlarge the volume or resources.sharedMemory, or choose another grpo.rollout.sync"
        )
    return None


def tensor_buckets(weights: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield this rank's tensors in groups of bounded size; a larger tensor is a group of its own."""
    bucket: dict[str, Tensor] = {}
    for name, tensor in weights:
        if tensor.is_meta:
            continue
        if bucket and sum(held_tensor.nbytes for held_tensor in bucket.values()) + tensor.nbytes > most_bytes:
            yield bucket
            bucket = {}
        # Copied: the owner may hold the next one in the same memory.
        bucket[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if bucket:
        yield bucket
