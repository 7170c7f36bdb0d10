"""Data, shapes and memory settings that belong to one of SFT and GRPO."""

from __future__ import annotations

from collections.abc import Mapping

from moejob_api.job import Method, Spec
from moejob_api.job.grpo import (
    RolloutPlacement,
)
from moejob_api.job.model import DataFormat, DataShape
from moejob_api.problems import Rule
from moejob_api.rules.object_rules.object_rule import IS_GRPO, Complaint, ObjectRule

SHAPED_FORMATS: Mapping[DataShape, tuple[DataFormat, ...]] = {
    DataShape.ALPACA: (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.PROMPTS),
    DataShape.GSM8K: (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION, DataFormat.PROMPTS),
    DataShape.SHARE_GPT: (DataFormat.CHAT,),
}


def _grpo_section(spec: Spec) -> Complaint:
    if (spec.method is Method.GRPO) == (spec.grpo is not None):
        return None
    if spec.method is Method.GRPO:
        return "method is GRPO but there is no grpo section; add one with at least one reward"
    return "the grpo section has no meaning for method SFT; remove it or set method to GRPO"


def _required_global_batch(spec: Spec) -> Complaint:
    if spec.method is Method.GRPO or spec.training.global_batch_size is not None:
        return None
    return "SFT needs globalBatchSize, the sequences of one optimizer update over all GPUs; 64 is a common start"


def _data_formats(spec: Spec) -> Complaint:
    wants_prompts = spec.method is Method.GRPO
    for index, dataset in enumerate((*spec.data.train, *spec.data.eval)):
        # An evaluation of SFT may generate answers too.
        may_ask = index >= len(spec.data.train) and dataset.format is DataFormat.PROMPTS
        if not may_ask and (dataset.format is DataFormat.PROMPTS) != wants_prompts:
            place = "train" if index < len(spec.data.train) else "eval"
            return f"{spec.method} cannot use format {dataset.format} of {place} source {dataset.source!r}; " + (
                "GRPO generates the answers: use Prompts"
                if wants_prompts
                else "SFT needs answers: use Chat, PromptCompletion or Text"
            )
    return None


def _shapes_of_formats(spec: Spec) -> Complaint:
    for dataset in (*spec.data.train, *spec.data.eval):
        formats = () if dataset.shape is None else SHAPED_FORMATS[dataset.shape]
        if dataset.shape is not None and dataset.format not in formats:
            return (
                f"shape {dataset.shape} of {dataset.source} cannot become format {dataset.format}; use "
                f"{' or '.join(formats)}"
            )
    return None


def _phases_for_offload(spec: Spec) -> Complaint:
    offloaded = [
        name
        for name, on in (
            ("offloadParameters", spec.memory.offload_parameters),
            ("offloadGradients", spec.memory.offload_gradients),
        )
        if on
    ]
    if spec.method is Method.GRPO or not offloaded:
        return None
    return (
        f"offloading by {' and '.join(offloaded)} only helps between the phases of GRPO: SFT needs weights and "
        "gradients on the GPU in every step; use offloadOptimizer: 1, sharding: FSDP or "
        "training.recompute instead"
    )


def _dropout_of_answers(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.training.lora is None or not spec.training.lora.dropout:
        return None
    return (
        f"dropout {spec.training.lora.dropout} gives answers other probabilities in training than when they were "
        "generated, and GRPO's ratios compare the two; set lora.dropout: 0"
    )


def _separate_offload(spec: Spec) -> Complaint:
    if spec.grpo is None or spec.grpo.rollout.placement is RolloutPlacement.COLOCATED:
        return None
    if not (spec.memory.offload_parameters or spec.memory.offload_gradients):
        return None
    return (
        "offloadParameters and offloadGradients make room for a colocated engine; with placement Separate they only "
        "cost time: remove them"
    )


_HAS_SHAPE_OF_FORMAT = "!has(d.shape) || d.format == 'Chat' || (d.format != 'Text' && d.shape != 'ShareGPT')"

METHOD_RULES: tuple[ObjectRule, ...] = (
    ObjectRule(
        Rule.METHOD,
        "spec.grpo",
        _grpo_section,
        f"({IS_GRPO}) == has(self.grpo)",
        "grpo is given exactly when method is GRPO",
    ),
    ObjectRule(
        Rule.METHOD,
        "spec.training.globalBatchSize",
        _required_global_batch,
        f"{IS_GRPO} || has(self.training.globalBatchSize)",
        "SFT needs globalBatchSize",
    ),
    ObjectRule(
        Rule.METHOD,
        "spec.data",
        _data_formats,
        f"[{IS_GRPO}].all(prompts, self.data.train.all(d, (d.format == 'Prompts') == prompts) && "
        "(!prompts || self.data.eval.all(d, d.format == 'Prompts')))",
        "GRPO takes data of format Prompts, SFT trains on any other",
    ),
    ObjectRule(
        Rule.CONFLICT,
        "spec.data",
        _shapes_of_formats,
        f"self.train.all(d, {_HAS_SHAPE_OF_FORMAT}) && self.eval.all(d, {_HAS_SHAPE_OF_FORMAT})",
        "shape ShareGPT becomes Chat; Alpaca and GSM8K become Chat, PromptCompletion or Prompts",
        on="spec.data",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory",
        _phases_for_offload,
        f"[self.memory].all(m, !m.offloadParameters && !m.offloadGradients) || {IS_GRPO}",
        "offloadParameters and offloadGradients only help between the phases of GRPO; use offloadOptimizer, "
        "FSDP or recompute for SFT",
    ),
    ObjectRule(
        Rule.LORA,
        "spec.training.lora.dropout",
        _dropout_of_answers,
        f"!({IS_GRPO}) || [self.training].all(t, !has(t.lora) || t.lora.dropout == 0.0)",
        "GRPO takes no lora.dropout",
    ),
    ObjectRule(
        Rule.OFFLOAD,
        "spec.memory",
        _separate_offload,
        "!has(self.grpo) || self.grpo.rollout.placement == 'Colocated' || [self.memory].all(m, !m.offloadParameters "
        "&& !m.offloadGradients)",
        "offloadParameters and offloadGradients make room for a colocated engine only",
    ),
)
