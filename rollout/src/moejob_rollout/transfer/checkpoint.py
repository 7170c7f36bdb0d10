"""A weight transfer whose tensors have the names and shapes of Hugging Face's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from moejob_api.contract.publications import PublicationReport
from moejob_rollout.transfer.completeness import LoadedNames, find_aliases, find_missing_tensors
from moejob_rollout.transfer.stacks import ExpertStack, StackBuilder, find_expert_layers, load_stack

# vLLM writes the lines of its own loggers alone.
logger = init_logger("vllm.moejob")

Init = TypeVar("Init", bound=WeightTransferInitInfo)
Update = TypeVar("Update", bound=WeightTransferUpdateInfo)


class CheckpointTransfer(WeightTransferEngine[Init, Update]):
    """Between start and finish, layers are loaded as from files, one by one."""

    _is_loading = False
    _layers: Mapping[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stacks = StackBuilder()
        self._names, self._changed = LoadedNames(), list[str]()
        if self.model_config.hf_config.model_type == "gpt_oss":
            from moejob_rollout.transfer.gpt_oss import load_by_loaders  # noqa: PLC0415  # slow to import

            load_by_loaders()

    def start_weight_update(self) -> None:
        """Take new weights from now on."""
        # An update that failed has left layers half loaded, which would count the same tensors twice and be complete
        # before the last ones come.
        if self._is_loading:
            self.finish_weight_update()
        self._is_loading = True
        self.stacks.clear()
        # A tied parameter is one object until the layers of both are laid out for loading.
        self._names, self._changed = LoadedNames(find_aliases(self.model)), []
        initialize_layerwise_reload(self.model)

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load some of the tensors; those of an MTP module may come later."""
        with disable_mtp_completeness_check():
            self._names.add_loaded(self.model.load_weights(tensors))

    def load_bucket(self, tensors: Iterable[tuple[str | ExpertStack, Tensor]]) -> None:
        """Load some of the tensors, and stacks of experts as one where vLLM can."""
        layers, singles = self._find_expert_layers(), list[tuple[str, Tensor]]()
        for name, tensor in tensors:
            if isinstance(name, str):
                singles.append((name, tensor))
            elif name.layer in layers:
                load_stack(layers[name.layer], name, tensor)
            else:
                singles += name.split_tensors(tensor)
        self.load(singles)

    def _find_expert_layers(self) -> Mapping[str, Any]:
        if self._layers is None:
            self._layers = find_expert_layers(self.model)
            logger.info("vLLM takes stacks of experts in %d layers, and one by one in all others", len(self._layers))
        return self._layers

    def note_tensors(self, names: Sequence[str]) -> None:
        """Note the tensors, or parts of stacks, that an update brings."""
        self._names.add_sent(names)

    def note_changed(self, names: Sequence[str]) -> None:
        """Note tensors that have come with other bytes than were sent."""
        self._changed += names

    def report_publication(self) -> PublicationReport:
        """Report tensors that are not as they have to be, before the end of the update, which forgets its counts."""
        return PublicationReport(
            missing=tuple(find_missing_tensors(self.model, self._names)),
            repeated=tuple(self._names.repeated),
            changed=tuple(self._changed),
        )

    def finish_weight_update(self) -> None:
        """Compute with the new weights from now on."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_loading = False

    def shutdown(self) -> None:
        """Nothing is held."""

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing is needed before the first update."""
