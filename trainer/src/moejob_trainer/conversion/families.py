"""Tensor names of each family in published files. A new family is a few rows here (docs/add-a-model.md).

Rotary weights stay as they are published: the rotary layer knows which elements of a head rotate together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from moejob_api.models.shape import Family, ModelShape
from moejob_trainer.conversion.tensor_table import ExpertStacking, TensorPiece, TensorRule, pieces_of_rule
from moejob_trainer.model.parameters import Parameter, model_parameters

_MODEL = (
    TensorRule("embedding.weight", "v h", "model.embed_tokens.weight", "v h"),
    TensorRule("final_norm.weight", "h", "model.norm.weight", "h"),
    TensorRule("output.weight", "v h", "lm_head.weight", "v h"),
)
_NORMS = (
    TensorRule("attention_norm.weight", "h", "input_layernorm.weight", "h"),
    TensorRule("mlp_norm.weight", "h", "post_attention_layernorm.weight", "h"),
)
_GROUPED_ATTENTION = (
    TensorRule("attention.query.weight", "n d h", "self_attn.q_proj.weight", "(n d) h"),
    TensorRule("attention.query.bias", "n d", "self_attn.q_proj.bias", "(n d)"),
    TensorRule("attention.key_value.weight", "g 0 d h", "self_attn.k_proj.weight", "(g d) h"),
    TensorRule("attention.key_value.weight", "g 1 d h", "self_attn.v_proj.weight", "(g d) h"),
    TensorRule("attention.key_value.bias", "g 0 d", "self_attn.k_proj.bias", "(g d)"),
    TensorRule("attention.key_value.bias", "g 1 d", "self_attn.v_proj.bias", "(g d)"),
    TensorRule("attention.sinks", "n", "self_attn.sinks", "n"),
    TensorRule("attention.output.weight", "h n d", "self_attn.o_proj.weight", "h (n d)"),
    TensorRule("attention.output.bias", "h", "self_attn.o_proj.bias", "h"),
)
_HEAD_NORMS = (
    TensorRule("attention.query_norm.weight", "d", "self_attn.q_norm.weight", "d"),
    TensorRule("attention.key_norm.weight", "d", "self_attn.k_norm.weight", "d"),
)
_JOINT_NORMS = (
    TensorRule("attention.query_norm.weight", "n d", "self_attn.q_norm.weight", "(n d)"),
    TensorRule("attention.key_norm.weight", "g d", "self_attn.k_norm.weight", "(g d)"),
)
_LATENT_ATTENTION = (
    TensorRule("attention.query.weight", "n d h", "self_attn.q_proj.weight", "(n d) h"),
    TensorRule("attention.query_down.weight", "r h", "self_attn.q_a_proj.weight", "r h"),
    TensorRule("attention.query_down.bias", "r", "self_attn.q_a_proj.bias", "r"),
    TensorRule("attention.query_down_norm.weight", "r", "self_attn.q_a_layernorm.weight", "r"),
    TensorRule("attention.query_up.weight", "n d r", "self_attn.q_b_proj.weight", "(n d) r"),
    TensorRule("attention.key_value_down.weight", "r h", "self_attn.kv_a_proj_with_mqa.weight", "r h"),
    TensorRule("attention.key_value_down.bias", "r", "self_attn.kv_a_proj_with_mqa.bias", "r"),
    TensorRule("attention.key_value_down_norm.weight", "r", "self_attn.kv_a_layernorm.weight", "r"),
    TensorRule("attention.key_value_up.weight", "n d r", "self_attn.kv_b_proj.weight", "(n d) r"),
    TensorRule("attention.output.weight", "h n d", "self_attn.o_proj.weight", "h (n d)"),
    TensorRule("attention.output.bias", "h", "self_attn.o_proj.bias", "h"),
)
_DELTA_RULE = (
    TensorRule("attention.convolution", "c o w", "linear_attn.conv1d.weight", "c o w"),
    TensorRule("attention.decay_log", "n", "linear_attn.A_log", "n"),
    TensorRule("attention.decay_bias", "n", "linear_attn.dt_bias", "n"),
    TensorRule("attention.state_norm.weight", "d", "linear_attn.norm.weight", "d"),
    TensorRule("attention.state_output.weight", "h n d", "linear_attn.out_proj.weight", "h (n d)"),
)
_JOINT_GATES = (
    TensorRule("attention.state_input.weight", "g d h", "linear_attn.in_proj_qkvz.weight", "(g d) h"),
    TensorRule("attention.state_rates.weight", "g d h", "linear_attn.in_proj_ba.weight", "(g d) h"),
    *_DELTA_RULE,
)
_SEPARATE_GATES = (
    TensorRule("attention.state_input.weight", "g d h", "linear_attn.in_proj_qkv.weight", "(g d) h"),
    TensorRule("attention.state_gate.weight", "n d h", "linear_attn.in_proj_z.weight", "(n d) h"),
    TensorRule("attention.state_strength.weight", "n h", "linear_attn.in_proj_b.weight", "n h"),
    TensorRule("attention.state_decay.weight", "n h", "linear_attn.in_proj_a.weight", "n h"),
    *_DELTA_RULE,
)
_MTP = (
    TensorRule("mtp.embedding_norm.weight", "h", "enorm.weight", "h"),
    TensorRule("mtp.hidden_norm.weight", "h", "hnorm.weight", "h"),
    TensorRule("mtp.projection.weight", "o i", "eh_proj.weight", "o i"),
    TensorRule("mtp.final_norm.weight", "h", "shared_head.norm.weight", "h"),
)


def _gated_rules(ours: str, theirs: str) -> tuple[TensorRule, ...]:
    return (
        TensorRule(f"{ours}.gate_up.weight", "0 f h", f"{theirs}.gate_proj.weight", "f h"),
        TensorRule(f"{ours}.gate_up.weight", "1 f h", f"{theirs}.up_proj.weight", "f h"),
        TensorRule(f"{ours}.gate_up.bias", "0 f", f"{theirs}.gate_proj.bias", "f"),
        TensorRule(f"{ours}.gate_up.bias", "1 f", f"{theirs}.up_proj.bias", "f"),
        TensorRule(f"{ours}.down.weight", "h f", f"{theirs}.down_proj.weight", "h f"),
        TensorRule(f"{ours}.down.bias", "h", f"{theirs}.down_proj.bias", "h"),
    )


def _expert_rules(theirs: str, gate: str, up: str, down: str) -> tuple[TensorRule, ...]:
    return (
        TensorRule("moe.experts.gate_up", "e 0 f h", f"{theirs}.{{e}}.{gate}.weight", "f h"),
        TensorRule("moe.experts.gate_up", "e 1 f h", f"{theirs}.{{e}}.{up}.weight", "f h"),
        TensorRule("moe.experts.down", "e h f", f"{theirs}.{{e}}.{down}.weight", "h f"),
    )


_DENSE = (*_MODEL, *_NORMS, *_GROUPED_ATTENTION, *_HEAD_NORMS, *_gated_rules("mlp", "mlp"))
_ROUTER = (TensorRule("moe.router.weight", "e h", "mlp.gate.weight", "e h"),)
_EXPERTS = (*_ROUTER, *_expert_rules("mlp.experts", "gate_proj", "up_proj", "down_proj"))
_MIXTRAL = (
    TensorRule("moe.router.weight", "e h", "block_sparse_moe.gate.weight", "e h"),
    *_expert_rules("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_GATED_SHARED = (
    *_gated_rules("moe.shared", "mlp.shared_expert"),
    TensorRule("moe.shared_gate.weight", "o h", "mlp.shared_expert_gate.weight", "o h"),
)
_SHARED_EXPERTS = _gated_rules("moe.shared", "mlp.shared_experts")
_DEEPSEEK_EXPERTS = (
    *_EXPERTS,
    *_SHARED_EXPERTS,
    TensorRule("moe.router.selection_bias", "e", "mlp.gate.e_score_correction_bias", "e"),
)
# A matrix of one row.
_ERNIE_BIAS = TensorRule("moe.router.selection_bias", "e", "mlp.moe_statics.e_score_correction_bias", "() e")
_MINIMAX_BIAS = TensorRule("moe.router.selection_bias", "e", "block_sparse_moe.e_score_correction_bias", "e")
# All experts in one tensor, with inputs first, and gate and up in turns.
_GPT_OSS = (
    TensorRule("moe.router.weight", "e h", "mlp.router.weight", "e h"),
    TensorRule("moe.router.bias", "e", "mlp.router.bias", "e"),
    TensorRule("moe.experts.gate_up", "e p f h", "mlp.experts.gate_up_proj", "e h (f p)"),
    TensorRule("moe.experts.gate_up_bias", "e p f", "mlp.experts.gate_up_proj_bias", "e (f p)"),
    TensorRule("moe.experts.down", "e h f", "mlp.experts.down_proj", "e f h"),
    TensorRule("moe.experts.down_bias", "e h", "mlp.experts.down_proj_bias", "e h"),
)
_DEEPSEEK = (*_MODEL, *_NORMS, *_LATENT_ATTENTION, *_gated_rules("mlp", "mlp"), *_DEEPSEEK_EXPERTS)

ROWS: Mapping[Family, tuple[TensorRule, ...]] = {
    Family.LLAMA: _DENSE,
    Family.QWEN2: _DENSE,
    Family.QWEN3: _DENSE,
    Family.MIXTRAL: (*_DENSE, *_MIXTRAL),
    Family.QWEN2_MOE: (*_DENSE, *_EXPERTS, *_GATED_SHARED),
    Family.QWEN3_MOE: (*_DENSE, *_EXPERTS),
    Family.QWEN3_NEXT: (*_DENSE, *_JOINT_GATES, *_EXPERTS, *_GATED_SHARED),
    Family.QWEN3_5_MOE: (*_DENSE, *_SEPARATE_GATES, *_EXPERTS, *_GATED_SHARED),
    Family.DEEPSEEK_V2: _DEEPSEEK,
    Family.DEEPSEEK_V3: (*_DEEPSEEK, *_MTP),
    Family.GLM4_MOE: (*_DENSE, *_DEEPSEEK_EXPERTS, *_MTP),
    Family.GLM4_MOE_LITE: (*_DEEPSEEK, *_MTP),
    Family.OLMOE: (*_MODEL, *_NORMS, *_GROUPED_ATTENTION, *_JOINT_NORMS, *_EXPERTS),
    Family.ERNIE4_5_MOE: (*_DENSE, *_EXPERTS, *_SHARED_EXPERTS, _ERNIE_BIAS),
    Family.MINIMAX_M2: (*_MODEL, *_NORMS, *_GROUPED_ATTENTION, *_JOINT_NORMS, *_MIXTRAL, _MINIMAX_BIAS),
    Family.GPT_OSS: (*_DENSE, *_GPT_OSS),
}


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """A published tensor that repeats another one. Files may lack it; our exports have it where `is_written`."""

    tensor: str
    original: str
    is_written: bool


@dataclass(frozen=True)
class TensorTable:
    """All pieces of one model."""

    shape: ModelShape
    parameters: tuple[Parameter, ...]
    pieces: tuple[TensorPiece, ...]
    copies: tuple[TensorCopy, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Parameter]:
        """Our parameters by their global names."""
        return {parameter.name: parameter for parameter in self.parameters}

    @cached_property
    def by_parameter(self) -> Mapping[str, tuple[TensorPiece, ...]]:
        """The pieces that fill each parameter."""
        filled: dict[str, list[TensorPiece]] = {}
        for piece in self.pieces:
            filled.setdefault(piece.parameter, []).append(piece)
        return {name: tuple(parameter_pieces) for name, parameter_pieces in filled.items()}

    @cached_property
    def by_tensor(self) -> Mapping[str, TensorPiece]:
        """The piece of each of their tensors."""
        return {piece.tensor: piece for piece in self.pieces}


def build_tensor_table(shape: ModelShape, stacking: ExpertStacking | None = None) -> TensorTable:
    """Build the table of a model, with single experts or stacks of them."""
    declared = model_parameters(shape)
    all_pieces = tuple(piece for parameter in declared for piece in _pieces_of_parameter(shape, parameter, stacking))
    return TensorTable(shape, declared, all_pieces, tuple(_tensor_copies(shape)))


def _pieces_of_parameter(
    shape: ModelShape, parameter: Parameter, stacking: ExpertStacking | None
) -> Iterator[TensorPiece]:
    prefix, suffix = split_parameter_name(parameter.name, len(shape.layers))
    rows = [row for row in ROWS[shape.family] if row.parameter == suffix]
    if not rows:
        raise ValueError(f"no row of {shape.family} fills {parameter.name}")
    for row in rows:
        yield from pieces_of_rule(row, parameter, prefix + row.tensor, shape.vocabulary, stacking)


def split_parameter_name(name: str, layers: int) -> tuple[str, str]:
    """Return a parameter's prefix in their files, and its name in the rows. MTP comes after the last layer there."""
    match name.split("."):
        case ["layers", index, *rest]:
            return f"model.layers.{index}.", ".".join(rest)
        case ["mtp", index, "layer", *rest]:
            return f"model.layers.{layers + int(index)}.", ".".join(rest)
        case ["mtp", index, *rest]:
            return f"model.layers.{layers + int(index)}.", ".".join(["mtp", *rest])
        case _:
            return "", name


def _tensor_copies(shape: ModelShape) -> Iterator[TensorCopy]:
    embedding = "model.embed_tokens.weight"
    output = embedding if shape.tied_embeddings else "lm_head.weight"
    if shape.tied_embeddings:
        yield TensorCopy("lm_head.weight", embedding, is_written=False)
    # Engines look for the embedding and the output projection of an MTP module beside its layer.
    for index in range(len(shape.layers), len(shape.layers) + len(shape.mtp_layers)):
        yield TensorCopy(f"model.layers.{index}.embed_tokens.weight", embedding, is_written=True)
        yield TensorCopy(f"model.layers.{index}.shared_head.head.weight", output, is_written=True)
