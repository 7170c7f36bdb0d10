"""Rules of Megatron's checkpoints, as the model that a job starts from and as what it writes at the end."""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.derived import trained_shape
from moejob_api.job import Spec
from moejob_api.models.shape import ModelShape
from moejob_api.models.trainable import CONVERTED_FAMILIES, UNCONVERTED_FAMILIES
from moejob_api.problems import Problem, Rule

_WITHOUT_MTP = "set training.mtpLossCoefficient to 0 to train without them"


def megatron_checkpoint_problems(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    """Every way in which a checkpoint of Megatron could not be read or written."""
    model = spec.model
    if model.config is not None and not model.is_folder:
        yield _checkpoint_problem(
            "model.config",
            f"it describes a checkpoint of Megatron in a folder, and {model.source} is a name on the hub; remove it",
        )
    elif model.config is not None and shape is not None:
        yield from _family_problems("model.config", shape)
        if trained_shape(shape, spec).mtp_layers:
            yield _checkpoint_problem(
                "model.config", f"a checkpoint of Megatron is read without MTP modules; {_WITHOUT_MTP}"
            )
    if spec.checkpoint.export_megatron:
        yield from _export_problems(spec, shape)


def _export_problems(spec: Spec, shape: ModelShape | None) -> Iterator[Problem]:
    field = "checkpoint.exportMegatron"
    if not spec.checkpoint.export_hugging_face:
        yield _checkpoint_problem(field, "it is made of the Hugging Face export; set exportHuggingFace to true")
    if spec.training.lora is not None:
        yield _checkpoint_problem(
            field,
            "adapters are no model; remove it, and export the merged model afterwards with moejob export "
            "--merge-adapters --to megatron",
        )
    if shape is None:
        return
    if trained_shape(shape, spec).mtp_layers:
        yield _checkpoint_problem(field, f"MTP modules would stay behind; {_WITHOUT_MTP}")
    yield from _family_problems(field, shape)


def _family_problems(field: str, shape: ModelShape) -> Iterator[Problem]:
    if shape.family not in CONVERTED_FAMILIES:
        reason = UNCONVERTED_FAMILIES.get(shape.family, f"{shape.family} was not measured")
        families = ", ".join(sorted(CONVERTED_FAMILIES))
        yield _checkpoint_problem(field, f"{reason}; use a model of {families}", Rule.MODEL_FAMILY)


def _checkpoint_problem(field: str, message: str, rule: Rule = Rule.CONFLICT) -> Problem:
    return Problem(rule, f"spec.{field}", message)
