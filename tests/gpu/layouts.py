"""Trains the tiny model in one layout on all GPUs of this machine and prints its losses; torchrun starts it.

torchrun --nproc-per-node 2 tests/gpu/layouts.py '{"expert": 2}' '{"sharding": "FSDP"}' '{"dispatcher": "Flex"}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "trainer" / "src"), str(ROOT / "crds" / "src"), str(ROOT / "tests")]

import torch  # noqa: E402 the trainer may lie there unpacked
import torch.distributed as dist  # noqa: E402

from gpu.training import SEED, STEPS, global_batches, loss, make_job  # noqa: E402
from moejob_api.layout.sizes import derive_layout as layout_of  # noqa: E402
from moejob_api.models import catalog  # noqa: E402
from moejob_trainer.megatron.stages import build_stages  # noqa: E402
from moejob_trainer.megatron.topology import start_groups  # noqa: E402
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement  # noqa: E402
from moejob_trainer.megatron.weights import initialise_weights  # noqa: E402
from moejob_trainer.model.architecture import read_architecture  # noqa: E402
from moejob_trainer.model.parameters import model_parameters  # noqa: E402


def main(
    parallelism: dict[str, object],
    memory: dict[str, object],
    moe: dict[str, object] | None = None,
    precision: dict[str, object] | None = None,
) -> None:
    """Trains and prints losses and gradient norms as JSON. In bfloat16 where a precision is given."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    model = read_architecture(dict(catalog.find_config("moejob/tiny-moe") or {}))
    spec = make_job("bfloat16" if precision else "float32", "cuda", parallelism, memory, moe, precision)
    layout = layout_of(spec.parallelism, 8)
    groups = start_groups(layout, spec.moe.dispatcher)
    stages = build_stages(model, spec, layout, groups, device)
    initialise_weights(stages, model_parameters(model.shape), groups, SEED)
    engine = MegatronTrainingEngine(model, spec, stages, TrainingPlacement(groups, device), lambda _: 2e-3)
    results = [engine.update(global_batches(step, spec)[groups.data.rank], loss) for step in range(STEPS)]
    if groups.world.rank == 0:
        print(json.dumps({"losses": [r.loss for r in results], "norms": [r.gradient_norm for r in results]}))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(json.loads, sys.argv[1:5]))
