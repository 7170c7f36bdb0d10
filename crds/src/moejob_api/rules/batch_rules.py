"""Divisibility of sequences and batches over the groups that share them.

A sequence is a multiple of 2 x context (two chunks a rank; 1 for context 1) and of tensor under sequence parallelism:
for context 2 and tensor 4 of 2 x 2 x 4 = 16. A batch is a multiple of microBatchSize x data, and of that x pipeline
where the schedule is interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator

from moejob_api.arithmetic import round_up
from moejob_api.derived import global_batch_size, sequence_divisor
from moejob_api.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.problems import Problem, Rule


def batch_problems(spec: Spec, layout: Layout) -> Iterator[Problem]:
    """Every way in which sequences or batches do not divide."""
    yield from _sequence_problems(spec, layout)
    yield from _rollout_batch_problems(spec)
    if spec.training.dynamic_batch_tokens is not None:
        yield from _dynamic_batch_problems(spec, layout)
        return
    yield from _static_batch_problems(spec, layout)


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
    grpo, answers = spec.grpo, spec.grpo.answers_per_step
    product = f"promptsPerStep {grpo.prompts_per_step} x groupSize {grpo.group_size}"
    if grpo.updates_per_step is not None and answers % grpo.updates_per_step:
        yield Problem(
            Rule.GLOBAL_BATCH,
            "spec.grpo.updatesPerStep",
            f"the {answers} answers of a step ({product}) do not divide into updatesPerStep {grpo.updates_per_step}; "
            f"change it to a divisor of {answers}",
        )
        return
    batch_size = spec.training.global_batch_size
    if batch_size is None:
        return
    if answers % batch_size:
        yield Problem(
            Rule.GLOBAL_BATCH,
            "spec.training.globalBatchSize",
            f"the {answers} answers of a step ({product}) do not divide into updates of globalBatchSize {batch_size}; "
            f"change it to a divisor of {answers}, or remove it",
        )
    elif grpo.updates_per_step is not None and answers // grpo.updates_per_step != batch_size:
        yield Problem(
            Rule.GLOBAL_BATCH,
            "spec.training.globalBatchSize",
            f"updatesPerStep {grpo.updates_per_step} of {answers} answers ({product}) are updates of "
            f"{answers // grpo.updates_per_step}, but globalBatchSize is {batch_size}; remove one of the two",
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
            f"ranks; change it to {_nearest_multiples(sequences, share)}",
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
            f"{_nearest_multiples(sequences, step)}, or remove virtualPipeline",
        )


def _nearest_multiples(value: int, step: int) -> str:
    # 10 in steps of 8: "8 or 16". 5 in steps of 8: "8", for 0 is no batch.
    below, above = value // step * step, round_up(value, step)
    return f"{below} or {above}" if below else str(above)
