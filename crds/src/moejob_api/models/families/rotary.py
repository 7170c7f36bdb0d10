"""Refusals of rotary embeddings that the trainer does not compute, as Transformers would read them from config.json.

Transformers looks into `rope_scaling`, then into `rope_parameters`, then beside them; so does this.
"""

from __future__ import annotations

from collections.abc import Mapping

from moejob_api.models.reader import ConfigReader, shown_value
from moejob_api.models.shape import Family, GroupedAttention, LatentAttention, ModelShape

# The numbers that each way of stretching positions needs, and the numbers that it may have.
_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    ),
}
# Transformers turns a part of each head in these families only.
_PARTIAL: Mapping[Family, float] = {
    Family.GLM4_MOE: 0.5,
    Family.QWEN3_NEXT: 0.25,
    Family.QWEN3_5_MOE: 0.25,
    Family.MINIMAX_M2: 1.0,
}


def refuse_unknown_rotary(config: ConfigReader, shape: ModelShape) -> None:
    """Refuse angles that would be other ones than the model's."""
    settings = _rotary_settings(config)
    kind = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NUMBERS:
        config.refuse_model(
            f"rope_type is {shown_value(kind)}; the trainer computes {', '.join(_NUMBERS)}: use a model with one of "
            "these"
        )
    needed, optional = _NUMBERS[kind]
    # Transformers takes null and 0 of the optional ones for absent.
    for name in (*needed, *(name for name in optional if settings.get(name) not in (None, 0))):
        _refuse_nonpositive(config, f"{name} of rope_type {kind}", settings.get(name))
    _refuse_nonpositive(config, "rope_theta", settings.get("rope_theta", config.values.get("rope_theta", 10_000.0)))
    if not isinstance(settings.get("truncate", False), bool):
        config.refuse_model(
            f"truncate of rope_type {kind} is {shown_value(settings['truncate'])}; expected true or false"
        )
    if kind == "llama3" and settings["low_freq_factor"] == settings["high_freq_factor"]:
        config.refuse_model(
            "low_freq_factor and high_freq_factor of rope_type llama3 are equal; make the second larger"
        )
    _refuse_odd_pairs(config, shape, _turned_part(config, shape.family, settings))


def _rotary_settings(config: ConfigReader) -> Mapping[str, object]:
    for key in ("rope_scaling", "rope_parameters"):
        settings = config.values.get(key)
        if settings is not None and not isinstance(settings, Mapping):
            config.refuse_model(f"{key} is {shown_value(settings)}; expected an object with rope_type")
        if not settings:
            continue
        if any(isinstance(inner, Mapping) for inner in settings.values()):
            config.refuse_model(
                f"{key} has other angles for each kind of layer; the trainer computes one for all: use a model with one"
            )
        return settings
    return {}


def _turned_part(config: ConfigReader, family: Family, settings: Mapping[str, object]) -> float:
    absent = _PARTIAL.get(family, 1.0)
    if family is Family.MINIMAX_M2 and "rotary_dim" in config.values:
        absent = config.read_size("rotary_dim") / config.read_size("head_dim", absent=128)
    part = settings.get("partial_rotary_factor", config.values.get("partial_rotary_factor", absent))
    if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1:
        config.refuse_model(f"partial_rotary_factor is {shown_value(part)}; expected a number above 0, 1 at most")
    if family not in _PARTIAL and part != 1:
        config.refuse_model(
            f"partial_rotary_factor is {shown_value(part)}; Transformers turns whole heads in {family}: remove it"
        )
    if family is Family.MINIMAX_M2 and part != absent:
        config.refuse_model(
            f"partial_rotary_factor is {shown_value(part)}, and rotary_dim, which engines read, says {absent}: make "
            "both say the same"
        )
    return float(part)


def _refuse_odd_pairs(config: ConfigReader, shape: ModelShape, part: float) -> None:
    for attention in shape.attention_kinds():
        match attention:
            case GroupedAttention(head_dim=size):
                turned = int(size * part)
            case LatentAttention(rope_dim=size):
                turned = size
            case _:
                continue
        # Elements turn in pairs, and Transformers rounds up.
        if not turned or turned + turned % 2 > size:
            config.refuse_model(
                f"{turned} of the {size} elements of a head turn with their position, which cannot be paired; use an "
                "even number"
            )


def _refuse_nonpositive(config: ConfigReader, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        config.refuse_model(f"{name} is {shown_value(value)}; expected a number above 0")
