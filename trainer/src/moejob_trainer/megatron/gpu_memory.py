"""The trainer's GPU memory beside colocated engines: lent while they generate, taken back for the update.

Engines need their memory again when they wake, so the trainer gives first, and takes back only once they sleep.
"""

from __future__ import annotations

import torch

from moejob_api.job import Spec
from moejob_trainer.megatron.generation_offload import make_generation_offload
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine


class TrainerGpuMemory:
    """Memory of the trainer's GPU, which engines use while it waits for answers."""

    def __init__(self, spec: Spec, engine: MegatronTrainingEngine) -> None:
        parts, self._copies = (engine.stages, engine.data_parallel), engine.copies
        self._weights = make_generation_offload(*parts, parameters=spec.memory.offload_parameters, gradients=False)
        self._gradients = make_generation_offload(*parts, parameters=False, gradients=spec.memory.offload_gradients)

    def free_unused(self) -> None:
        """Free gradients with memory.offloadGradients, and the blocks that torch's allocator has cached."""
        self._gradients.move_to_host()
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Move weights to the host with memory.offloadParameters."""
        # A save in the background may still copy these weights.
        self._copies.finish_copy()
        self._weights.move_to_host()
        torch.cuda.empty_cache()

    def acquire(self) -> None:
        """Take both back."""
        self._weights.move_to_device()
        self._gradients.move_to_device()
