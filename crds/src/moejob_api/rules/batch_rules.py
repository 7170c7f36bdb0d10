"""How sequences and batches have to divide over the groups that share them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.arithmetic import round_up
from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.problems import Problem, Rule


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one optimizer update, seen from one data-parallel rank."""

    sequences: int
    micro_sequences: int
    micro_tokens: int
    microbatches: int
    updates_per_step: int


def batch(spec: Spec, layout: Layout) -> Batch:
    """How the global batch reaches the ranks; sizes that do not divide are rounded up, batch_problems names them."""
    training = spec.training
    sequences = global_batch_size(spec)
    of_rank = max(1, sequences // layout.data)
    micro = training.micro_batch_size
    rollouts = spec.grpo.prompts_per_step * spec.grpo.group_size if spec.grpo else sequences
    tokens = training.dynamic_batch_tokens
    if tokens is None:
        count = -(-of_rank // micro)
    else:
        # Only the longest samples are known before the data is; shorter ones give fewer microbatches.
        count = round_up(
            -(-of_rank * spec.data.max_length // tokens), layout.pipeline if layout.virtual_pipeline > 1 else 1
        )
    return Batch(
        sequences=sequences,
        micro_sequences=micro,
        micro_tokens=tokens or micro * spec.data.max_length,
        microbatches=count,
        updates_per_step=max(1, rollouts // sequences),
    )


def global_batch_size(spec: Spec) -> int:
    """Sequences of one optimizer update."""
    if spec.training.global_batch_size is not None:
        return spec.training.global_batch_size
    return spec.grpo.prompts_per_step * spec.grpo.group_size if spec.grpo else 1


def batch_problems(spec: Spec, layout: Layout) -> Iterator[Problem]:
    """Every way in which sequences or batches do not divide."""
    yield from _sequence_problems(spec, layout)
    yield from _rollout_batch_problems(spec)
    if spec.training.dynamic_batch_tokens is not None:
        yield from _dynamic_batch_problems(spec, layout)
        return
    yield from _static_batch_problems(spec, layout)


def sequence_divisor(layout: Layout) -> int:
    """What a sequence length must be a multiple of.

    Context ranks each take two chunks, one from the front and one from the back, so that causal attention costs them
    the same; sequence parallelism divides what a context rank holds once more.
    """
    chunks = 2 * layout.context if layout.context > 1 else 1
    return chunks * (layout.tensor if layout.sequence_parallel else 1)


def _sequence_problems(spec: Spec, layout: Layout) -> Iterator[Problem]:
    divisor = sequence_divisor(layout)
    lengths = (
        ("spec.data.maxLength", "maxLength", spec.data.max_length),
        ("spec.training.dynamicBatchTokens", "dynamicBatchTokens", spec.training.dynamic_batch_tokens),
    )
    for path, name, length in lengths:
        if length is not None and length % divisor:
            yield Problem(
                Rule.SEQUENCE_LENGTH,
                path,
                f"{name} {length} does not divide over context {layout.context} (two chunks each when above 1) and "
                f"tensor {layout.tensor}; change it to {round_up(length, divisor)}",
            )


def _rollout_batch_problems(spec: Spec) -> Iterator[Problem]:
    if spec.grpo is None:
        return
    answers, update = spec.grpo.prompts_per_step * spec.grpo.group_size, global_batch_size(spec)
    if answers % update:
        yield Problem(
            Rule.GLOBAL_BATCH,
            "spec.training.globalBatchSize",
            f"the {answers} answers of a step (promptsPerStep {spec.grpo.prompts_per_step} x groupSize "
            f"{spec.grpo.group_size}) do not divide into updates of globalBatchSize {update}; change it to a divisor "
            f"of {answers}, or remove it",
        )


def _dynamic_batch_problems(spec: Spec, layout: Layout) -> Iterator[Problem]:
    sequences = global_batch_size(spec)
    if sequences < layout.data:
        yield Problem(
            Rule.GLOBAL_BATCH,
            "spec.training.globalBatchSize",
            f"globalBatchSize {sequences} leaves some of the {layout.data} data-parallel ranks without a sequence; "
            f"change it to {layout.data} or more",
        )


def _static_batch_problems(spec: Spec, layout: Layout) -> Iterator[Problem]:
    sequences, micro = global_batch_size(spec), spec.training.micro_batch_size
    share = micro * layout.data
    if sequences % share:
        yield Problem(
            Rule.GLOBAL_BATCH,
            "spec.training.globalBatchSize",
            f"globalBatchSize {sequences} does not divide into microbatches of {micro} on {layout.data} data-parallel "
            f"ranks; change it to {_multiples(sequences, share)}",
        )
        return
    microbatches = sequences // share
    if layout.virtual_pipeline > 1 and microbatches % layout.pipeline:
        step = share * layout.pipeline
        yield Problem(
            Rule.MICROBATCHES,
            "spec.training.globalBatchSize",
            f"virtualPipeline {layout.virtual_pipeline} needs microbatches in multiples of pipeline "
            f"{layout.pipeline}, globalBatchSize {sequences} gives {microbatches}; change it to "
            f"{_multiples(sequences, step)}, or remove virtualPipeline",
        )


def _multiples(value: int, step: int) -> str:
    below, above = value // step * step, round_up(value, step)
    return f"{below} or {above}" if below else str(above)
