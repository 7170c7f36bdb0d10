"""Hidden states between the stages of a pipeline, of shapes that every stage knows.

Rows of a global batch have different lengths. Megatron then sends the shape of each tensor before the tensor, and both
sides wait for their GPU to read it: the host never runs ahead, and every micro batch starts with an idle GPU. But all
stages have the same micro batches: each looks the shape up, [tokens, 1, hidden], and sends none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

HiddenShape = tuple[int, int, int]
_NONE = [0, 0, 0]


class StageExchange(P2PCommunicator):
    """Megatron's exchange, with shapes from a list instead of from the other stage."""

    def __init__(self, config: ModelParallelConfig, shapes: Sequence[HiddenShape]) -> None:
        """Shapes are those of this pass's micro batches, in their order."""
        super().__init__(pp_group=parallel_state.get_pipeline_model_parallel_group(), config=config)
        self._shapes = shapes
        # An interleaved schedule takes chunks of micro batches in an order of its own.
        self._is_known = self.virtual_pipeline_model_parallel_size is None or len(set(shapes)) == 1
        self._moved = dict.fromkeys(("to next", "to previous", "from previous", "from next"), 0)

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[Any, Any]:
        """Megatron calls it by this name, and for each exchange once."""
        if not self._is_known:
            return super()._communicate_shapes(tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        for way, tensor in (("to next", tensor_send_next), ("to previous", tensor_send_prev)):
            if tensor is not None and list(tensor.shape) != (expected := self._next_shape(way)):
                raise RuntimeError(
                    f"a stage sends {list(tensor.shape)} {way}, which expects {expected} of its micro batch; report "
                    "this"
                )
        return (
            self._next_shape("from previous") if recv_prev else _NONE,
            self._next_shape("from next") if recv_next else _NONE,
        )

    def _next_shape(self, way: str) -> list[int]:
        """Return the shape of the next micro batch that goes this way: outputs and gradients keep their order."""
        number = self._moved[way]
        self._moved[way] += 1
        return [*self._shapes[number % len(self._shapes)]]


def schedule_groups() -> ProcessGroupCollection:
    """Return the groups that a schedule needs with a custom exchange; without one it looks up the same."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups
