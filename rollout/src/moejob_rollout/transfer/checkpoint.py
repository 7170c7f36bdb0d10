"""A weight transfer whose tensors have the names and shapes of Hugging Face's files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class CheckpointTransfer(WeightTransferEngine[Init, Update]):
    """Between start and finish, layers are loaded as from files, one by one."""

    _is_loading = False

    def start_weight_update(self) -> None:
        """Take new weights from now on."""
        # An update that failed has left layers half loaded, which would count the same tensors twice and be complete
        # before the last ones come.
        if self._is_loading:
            self.finish_weight_update()
        self._is_loading = True
        initialize_layerwise_reload(self.model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the tensors; those of an MTP module may come later."""
        with disable_mtp_completeness_check():
            self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        """Compute with the new weights from now on."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_loading = False

    def shutdown(self) -> None:
        """Nothing is held."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing is needed before the first update."""
