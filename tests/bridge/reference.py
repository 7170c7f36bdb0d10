"""The GPTModel that Megatron-Bridge builds from published files: an independent author's reading of each family."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bridge import without_cuda
from bridge.latent_attention import CausalAttention
from moejob_trainer.interchange.bridge_import import import_auto_bridge
from moejob_trainer.interchange.megatron_bridge import adapt_config, adapt_provider

# Plain Megatron-Core layers in float32; fusions need a GPU, and so does the dispatcher that the bridge chooses.
_PLAIN: dict[str, Any] = {
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "autocast_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "use_cpu_initialization": True,
    "perform_initialization": False,
    "attention_softmax_in_fp32": True,
    "moe_token_dispatcher_type": "allgather",
    "moe_aux_loss_coeff": 0.0,
    "cross_entropy_fusion_impl": "native",
}
_FUSIONS = (
    "apply_rope_fusion",
    "async_tensor_model_parallel_allreduce",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_shared_expert_overlap",
    "persist_layer_norm",
)


class MegatronModel(nn.Module):
    """Megatron's model of a folder; called like one of Transformers. Megatron's groups have to be there.

    Without `has_weights` its weights are undefined.
    """

    def __init__(self, folder: Path, *, has_weights: bool = True) -> None:
        super().__init__()
        without_cuda.prepare()
        self.bridge = import_auto_bridge().from_hf_pretrained(folder, torch_dtype=torch.float32)
        adapt_config(self.bridge.hf_pretrained.config)
        provider = self.bridge.to_megatron_provider(load_weights=False)
        _set(provider, _PLAIN | dict.fromkeys(_FUSIONS, False))
        adapt_provider(provider, self.bridge.hf_pretrained.config)
        provider.transformer_layer_spec = _local_layers
        provider.finalize()
        self.model: Any = provider.provide(pre_process=True, post_process=True)
        self.registry = self.bridge._model_bridge.mapping_registry()  # noqa: SLF001 the bridge offers no other way
        if has_weights:
            self._load(load_file(folder / "model.safetensors"))

    def forward(self, tokens: Tensor, use_cache: bool = False) -> SimpleNamespace:  # noqa: ARG002
        """[1, t] -> .logits [1, t, v]"""
        length = tokens.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        return SimpleNamespace(logits=self.model(tokens, torch.arange(length)[None], hidden))

    def save(self, folder: Path) -> None:
        """Write its parameters under Hugging Face's names."""
        folder.mkdir()
        tensors: dict[str, Tensor] = {}
        for mapping, module, tensor in self._mapped():
            tensors |= mapping.megatron_to_hf(tensor.detach(), module)
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        self.bridge.hf_pretrained.config.save_pretrained(folder)

    @torch.no_grad()
    def _load(self, published: dict[str, Tensor]) -> None:
        for mapping, module, tensor in self._mapped():
            names = mapping.hf_param
            theirs = published[names] if isinstance(names, str) else {key: published[at] for key, at in names.items()}
            tensor.copy_(mapping.hf_to_megatron(theirs, module))

    def _mapped(self) -> Iterator[tuple[Any, nn.Module, Tensor]]:
        """The bridge's mapping of each tensor, the module that it is in, and the tensor."""
        biases = ((name, buffer) for name, buffer in self.model.named_buffers() if name.endswith("expert_bias"))
        for name, tensor in chain(self.model.named_parameters(), biases):
            # The bridge knows experts as one grouped module; the local ones are modules of their own.
            known = re.sub(r"local_experts\.(\d+)\.(\w+)\.weight", r"\2.weight\1", name)
            module = self.model.get_submodule(name.rpartition(".")[0])
            module.config = self.model.config
            if known != name:
                # The mapping of a grouped expert looks up the type of the first. In the dict alone, it is no parameter.
                vars(module)["weight0"] = tensor
            yield self.registry.megatron_to_hf_lookup(known), module, tensor


def _local_layers(config: Any, vp_stage: int | None = None) -> Any:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    for layer in block.layer_specs if config.multi_latent_attention else ():
        layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return block


def _set(provider: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
