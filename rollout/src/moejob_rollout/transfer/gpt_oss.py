"""Updates of gpt-oss, whose experts and attention sinks vLLM 0.32 would not replace.

Its loader copies these tensors into parameters instead of calling the loaders of parameters. While an update is loaded,
parameters are on the meta device and keep nothing: vLLM records the calls of loaders, and repeats them once a layer has
memory. So an engine would keep the experts and sinks that it started with.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gpt_oss import GptOssModel

_COPIED = frozenset({"w13_weight", "w2_weight", "w13_bias", "w2_bias", "sinks"})


class RecordedParameter:
    """A parameter on the meta device: a copy into it, or into its data, is a call of its loader."""

    def __init__(self, layer: nn.Module, name: str, parameter: Any) -> None:
        self._parameter = parameter
        # The loader of experts takes gate and up apart, which gpt-oss has in turns, as its kernel does.
        parameter.weight_loader = default_weight_loader
        parameter.weight_loader = make_online_process_loader(layer, name)

    @property
    def data(self) -> RecordedParameter:
        """Return what sinks are copied into."""
        return self

    def copy_(self, tensor: Tensor) -> None:
        """Load a tensor that has the part of this worker."""
        self._parameter.weight_loader(self._parameter, tensor)


def load_by_loaders() -> None:
    """Let the loader of unquantized files call the loaders of parameters."""
    original = GptOssModel._load_weights_other  # noqa: SLF001  # it has no public name

    @wraps(original)
    def load(self: Any, *args: Any, **kwargs: Any) -> set[str]:
        parameters = dict(_recorded_parameters(self))
        # The loader asks the model for its parameters by this name.
        self.named_parameters = parameters.items
        try:
            loaded: set[str] = original(self, *args, **kwargs)
        finally:
            del self.named_parameters
        return loaded

    GptOssModel._load_weights_other = load  # noqa: SLF001


def _recorded_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for layer_name, layer in model.named_modules():
        for name, parameter in layer.named_parameters(layer_name, recurse=False):
            own_name = name.rpartition(".")[2]
            is_recorded = own_name in _COPIED and parameter.is_meta
            yield name, RecordedParameter(layer, own_name, parameter) if is_recorded else parameter
