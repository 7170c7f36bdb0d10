"""Compatibility of adapters from another job: they belong to the weights that they were trained beside.

Pure. Every checkpoint names its adapters; a job checks them here before it starts from another job's checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moejob_api.job import Spec
from moejob_api.job.base import ApiModel
from moejob_api.job.training import Lora
from moejob_trainer.errors import BadConfiguration


class AdapterFacts(ApiModel):
    """The adapters of a state, the published weights they belong to, and whether the state holds these weights too."""

    lora: Lora | None
    beside: str
    holds_weights: bool


def adapter_facts(spec: Spec, *, has_weights: bool) -> AdapterFacts:
    """Return the facts of a job's checkpoints. A model without published weights is made from the seed."""
    model = spec.model.source if spec.model.revision is None else f"{spec.model.source} ({spec.model.revision})"
    weights_name = model if has_weights else f"{model} made from seed {spec.training.seed}"
    # The published model, or the seed, gives the frozen weights again: such a job saves its adapters alone.
    has_adapters_alone = spec.training.lora is not None and spec.checkpoint.resume_from is None
    return AdapterFacts(lora=spec.training.lora, beside=weights_name, holds_weights=not has_adapters_alone)


def refuse_other_adapters(
    theirs: AdapterFacts, ours: AdapterFacts, checkpoint: Path, *, continues_run: bool = False
) -> None:
    """Raise if this job would lose another job's adapters, or misread them.

    A job that continues another's run, rather than only starting from its weights, cannot add adapters of its own.
    """
    if theirs.lora is None and ours.lora is not None and continues_run:
        raise BadConfiguration(
            f"{checkpoint} is of a run without adapters, and a run with training.lora cannot go on with it; leave out "
            "checkpoint.resume to begin with new adapters on its weights, or leave out training.lora"
        )
    if theirs.lora is None:
        return
    if ours.lora is None:
        raise BadConfiguration(
            f"{checkpoint} holds adapters, which this job would lose for want of training.lora; give it that of the "
            "other job, or merge the other's export into its model and name the result as model.source"
        )
    for name, their_value, our_value in _lora_differences(theirs.lora, ours.lora):
        raise BadConfiguration(
            f"{checkpoint} holds adapters of {name} {their_value} and training.lora.{name} of this job is "
            f"{our_value}; change it to "
            f"{their_value}, or leave out checkpoint.resumeFrom to begin with new adapters"
        )
    if not theirs.holds_weights and theirs.beside != ours.beside:
        raise BadConfiguration(
            f"{checkpoint} holds adapters beside the weights of {theirs.beside}, and this job trains beside those of "
            f"{ours.beside}, where they mean nothing; name the same model"
        )


def _lora_differences(theirs: Lora, ours: Lora) -> Iterator[tuple[str, str, str]]:
    for name, their_value, our_value in (
        ("rank", str(theirs.rank), str(ours.rank)),
        ("alpha", f"{theirs.alpha:g}", f"{ours.alpha:g}"),
        ("targets", ", ".join(sorted(theirs.targets)), ", ".join(sorted(ours.targets))),
    ):
        if their_value != our_value:
            yield name, their_value, our_value
