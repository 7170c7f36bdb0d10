"""A published model as Transformers computes it, with the weights of one part in memory at a time.

Knows nothing of our modules: it reads the published files, and computes with Transformers' own code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.logging import disable_progress_bar

from moejob_api.models.families import known_config
from moejob_trainer.conversion.adapters import WEIGHTS_FILE, adapter_pair_names
from moejob_trainer.conversion.checkpoint import StoredTensor, TensorSource, unusable_checkpoint
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share
from moejob_trainer.runtime.json_files import read_json


class ReferenceModel:
    """Transformers' model of some weights. `config_folder` holds their config.json; computed layers are reported."""

    def __init__(
        self,
        weights: TensorSource,
        config_folder: Path,
        dtype: torch.dtype,
        report_share: ShareReport = ignore_share,
    ) -> None:
        disable_progress_bar()
        # Never the files' own code, which Transformers would ask about on a terminal: we compare with its own.
        config = AutoConfig.for_model(**known_config(read_json(config_folder / "config.json")))
        # The source of weights has dequantized them.
        config.quantization_config = None
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation="eager",
                experts_implementation="eager",
                trust_remote_code=False,
            )
        self.weights, self.model, self.dtype = weights, model.eval(), dtype
        self._report_share = report_share
        self._base: Any = model.base_model
        # Rotary tables come from the config, no file has them: make them on a real device.
        rotary: Any = type(self._base.rotary_emb)
        self._base.rotary_emb = rotary(config=config)

    @torch.no_grad()
    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """[t] -> [t, h]"""
        with self._load_weights(self._base.embed_tokens, "model.embed_tokens."):
            states: Tensor = self._base.embed_tokens(tokens)
        return states

    @torch.no_grad()
    def apply_layers(self, inputs: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Apply some layers each to its own input, [t, h] -> [t, h]; the others are not even read."""
        if not inputs:
            return {}
        outputs: dict[int, Tensor] = {}

        def compute_layer(
            index: int, forward: Callable[..., Tensor], hidden: Tensor, *arguments: Any, **named: Any
        ) -> Tensor:
            if index in inputs:
                with (
                    self._load_weights(self._base.layers[index], f"model.layers.{index}."),
                    self._explain_mismatch(f"layer {index}"),
                ):
                    outputs[index] = forward(inputs[index].to(self.dtype)[None], *arguments, **named)[0]
                self._report_share(len(outputs), len(inputs))
            return hidden

        with ExitStack() as stack:
            stack.enter_context(_avoid_other_packages(self.model))
            # Run the whole model with replaced layers: it makes the masks and angles that layers take.
            for index, layer in enumerate(self._base.layers):
                stack.enter_context(_replace_forward(layer, partial(compute_layer, index, layer.forward)))
            stack.enter_context(_replace_forward(self._base.norm, lambda hidden: hidden))
            embedded = torch.zeros_like(next(iter(inputs.values())), dtype=self.dtype)[None]
            self._base(inputs_embeds=embedded, use_cache=False)
        return outputs

    @torch.no_grad()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Of the last layer's result. [t, h] -> [t, v]"""
        with self._load_weights(self._base.norm, "model.norm."):
            normed = self._base.norm(hidden.to(self.dtype))
        if self.model.config.tie_word_embeddings:
            with self._load_weights(self._base.embed_tokens, "model.embed_tokens."):
                return functional.linear(normed, self._base.embed_tokens.weight)
        head: Any = self.model.get_output_embeddings()
        with self._load_weights(head, "lm_head."):
            output: Tensor = head(normed)
        return output

    @contextmanager
    def _explain_mismatch(self, part: str) -> Iterator[None]:
        """Turn torch's error about sizes that contradict each other into one about the files."""
        try:
            yield
        except RuntimeError as error:
            raise unusable_checkpoint(
                f"Transformers cannot compute {part} of {self.weights.folder}: {error}"
            ) from error

    @contextmanager
    def _load_weights(self, module: nn.Module, prefix: str) -> Iterator[None]:
        """The module has its weights, as Transformers itself reads them, and loses them again."""
        tensors = self.weights.tensors
        state = {
            name: self.weights.read(name, tuple(slice(0, size) for size in stored.shape))
            for name, stored in tensors.items()
            if name.startswith(prefix)
        }
        load_config = LoadStateDictConfig(
            device_map={"": "cpu"},
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),  # noqa: SLF001 what from_pretrained asks
            weight_mapping=cast(Any, get_model_conversion_mapping(self.model)),
        )
        convert_and_load_state_dict_in_model(self.model, state, load_config)
        absent = [name for name, tensor in chain(module.named_parameters(), module.named_buffers()) if tensor.is_meta]
        if absent:
            class_name = type(self.model).__name__
            raise unusable_checkpoint(
                f"{self.weights.folder} has nothing for {prefix}{absent[0]} of Transformers' {class_name}"
            )
        yield
        module.to("meta")


@dataclass(frozen=True)
class AdaptedWeights:
    """Weights to which adapters in PEFT's format are added."""

    base: TensorSource
    adapters: Mapping[str, Tensor]
    scale: float

    @classmethod
    def read_from(cls, base: TensorSource, folder: Path, scale: float) -> AdaptedWeights:
        """With the adapters of a folder; `scale` is alpha over rank."""
        return cls(base, load_file(folder / WEIGHTS_FILE), scale)

    @property
    def folder(self) -> Path:
        """The folder of the base."""
        return self.base.folder

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The base's tensors by name: adapters change numbers, not names and shapes."""
        return self.base.tensors

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor; in float32 where an adapter is added."""
        weight = self.base.read(name, part)
        a, b = (self.adapters.get(factor) for factor in adapter_pair_names(name))
        if a is None or b is None:
            return weight
        # In float32, like the model that is trained: it is rounded once, to the type that the reference computes in.
        return weight.float() + (self.scale * b.float() @ a.float())[part]


@contextmanager
def _avoid_other_packages(model: PreTrainedModel) -> Iterator[None]:
    """Compute in operations of torch: the kernels that Transformers takes where it finds them are not for a CPU.

    flash-linear-attention, for one, takes the place of functions of a model's module when that is imported.
    """
    functions = vars(sys.modules[type(model).__module__])
    wrapped = {name: function for name, function in functions.items() if _is_wrapped(function)}
    functions.update({name: inspect.unwrap(function) for name, function in wrapped.items()})
    try:
        yield
    finally:
        functions.update(wrapped)


def _is_wrapped(value: object) -> bool:
    return inspect.isfunction(value) and hasattr(value, "__wrapped__")


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    vars(module)["forward"] = forward
    yield
    del vars(module)["forward"]
