"""An engine with random weights on the GPUs of this machine, as the benchmarks of training measure it.

Without GPUs the ranks are processes of the CPU, which shows that a benchmark runs and measures nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor

from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_api.models.shape import ModelShape
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import start_groups, stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement
from moejob_trainer.megatron.weights import initialise_weights
from moejob_trainer.model.architecture import Architecture, read_architecture
from moejob_trainer.model.parameters import model_parameters
from moejob_trainer.model.stage import ModelStage
from moejob_trainer.objectives.losses import cross_entropy
from moejob_trainer.runtime.cpu_backend import cpu_backend
from moejob_trainer.setup.training_engine import build_model_stages
from moejob_trainer.training import Document, LossTerms, MicroBatch, TokenOutputs
from moejob_trainer.training.micro_batch import ROUTING


@dataclass(frozen=True, slots=True, eq=False)
class Started:
    """The engine of one rank and what it was made of."""

    engine: MegatronTrainingEngine
    model: Architecture
    spec: Spec
    sizes: Layout
    groups: Groups

    def batch(
        self, lengths: Sequence[int], random: np.random.Generator, *, is_balanced: bool = False
    ) -> list[MicroBatch]:
        """This rank's micro batches of random documents of these lengths. is_balanced: all experts get as many."""
        return self.micro_batches(
            [
                Document(
                    random.integers(0, self.model.shape.vocabulary, length),
                    np.ones(length, np.float32),
                    n,
                    inputs={ROUTING: balanced_routing(self.model.shape, length, random)} if is_balanced else {},
                )
                for n, length in enumerate(lengths)
            ]
        )

    def micro_batches(self, documents: Sequence[Document]) -> list[MicroBatch]:
        """This rank's micro batches of a global batch."""
        return build_global_batch(documents, batch_plan(self.spec, self.sizes, 0))[self.groups.data.rank]


def balanced_routing(shape: ModelShape, length: int, random: np.random.Generator) -> npt.NDArray[np.int16]:
    """Random choices as ROUTING has them, of which every expert gets as many. [length, routed layers, k]

    Tokens that follow one another choose from the same shuffled experts until all of them are chosen.
    """
    if shape.experts is None:
        raise ValueError("balanced choices are for models with experts")
    count, per_token = shape.experts.count, shape.experts.per_token
    if count % per_token:
        raise ValueError(f"{count} experts are not dealt out {per_token} at a time; take a model where they are")
    layers, rounds = len(shape.routed_layers), -(-length * per_token // count)
    experts = np.tile(np.arange(1, count + 1, dtype=np.int16), (layers, rounds, 1))
    dealt = random.permuted(experts, axis=-1).reshape(layers, -1, per_token)[:, :length]
    return np.ascontiguousarray(dealt.swapaxes(0, 1))


@dataclass(frozen=True, slots=True)
class Beginning:
    """Weights that are the same however the model is divided, which takes longer; `reached` hears of each part done."""

    reached: Callable[[str], None]


def print_nothing(_: str) -> None:
    """Take no notice of a part that is done."""


def start_engine(
    config: Mapping[str, Any],
    spec: Spec,
    device: torch.device,
    rate: Callable[[int], float] = lambda _: 1e-5,
    beginning: Beginning | None = None,
) -> Started:
    """The engine of a job for a model with this config.json; `rate` returns the learning rate of a step."""
    reached = print_nothing if beginning is None else beginning.reached
    model, sizes = read_architecture(config), layout_of(spec.parallelism, 8)
    groups = start_groups(sizes, spec.moe.dispatcher)
    placement = TrainingPlacement(groups, device)
    stages = build_model_stages(config, model, spec, sizes, placement)
    reached("stages built")
    if beginning is not None:
        initialise_weights(stages, model_parameters(model.shape), groups, seed=1, device=device)
    else:
        _fill(stages)
    synchronize(device)
    reached("weights set")
    engine = MegatronTrainingEngine(model, spec, stages, placement, rate)
    synchronize(device)
    reached("engine built")
    return Started(engine, model, spec, sizes, groups)


def _fill(stages: Sequence[ModelStage]) -> None:
    """Fill each rank's part with the same numbers: replicas begin alike, and it takes no time."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in (pair for stage in stages for pair in stage.named_parameters()):
            held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            held.fill_(1.0) if "norm" in name else held.normal_(std=0.02)


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The processes that torchrun started, or one alone. They may join and part more than once."""

    rank: int
    size: int
    device: torch.device
    store: Store

    @classmethod
    def of_launch(cls) -> Ranks:
        """Find the others, and take this rank's GPU."""
        for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
            os.environ.setdefault(name, value)
        os.environ.setdefault("MASTER_PORT", "29511")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        else:
            device = torch.device("cpu")
        store, rank, size = next(rendezvous("env://"))
        return cls(rank, size, device, store)

    def join(self, meeting: str) -> None:
        """Make the group of all ranks; `meeting` is another name each time, for addresses of the last are stale."""
        # After torchrun has started the ranks again, too.
        store = PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{meeting}", self.store)
        if self.device.type == "cuda":
            dist.init_process_group("nccl", store=store, rank=self.rank, world_size=self.size, device_id=self.device)
        else:
            dist.init_process_group(cpu_backend(), store=store, rank=self.rank, world_size=self.size)
            use_cpu()

    def part(self, *, is_broken: bool = False) -> None:
        """End all groups, and hand memory back. is_broken: others may wait in an exchange that never comes."""
        stop_groups()
        if not dist.is_initialized():
            return
        if is_broken and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001 what waits for the exchange would wait for ever
        else:
            dist.destroy_process_group()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()  # noqa: SLF001 torch.accelerator has it in new versions only
            torch.cuda.reset_peak_memory_stats()


def join_ranks() -> torch.device:
    """Join the ranks that torchrun started, or be alone. This rank's GPU."""
    ranks = Ranks.of_launch()
    ranks.join("only")
    return ranks.device


def resources(device: torch.device) -> dict[str, str]:
    """Return what a job on this device says of its resources."""
    return {"gpuType": "H200"} if device.type == "cuda" else {"accelerator": "CPU"}


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_gib(device: torch.device) -> float:
    """Return the most memory that tensors have had on the GPU of any rank. All ranks call it."""
    most = torch.tensor(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0.0, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return round(most.item() / 2**30, 1)


def stack(device: torch.device) -> dict[str, str]:
    """Return what was measured on."""
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
    }


def loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return what supervised fine-tuning learns from."""
    return LossTerms(cross_entropy(outputs.log_probabilities, batch.weights))
