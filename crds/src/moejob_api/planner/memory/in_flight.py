"""Microbatches whose activations a pipeline stage holds at once, chunk by chunk, under Megatron's two schedules."""

from __future__ import annotations

from moejob_api.layout.sizes import Layout


def in_flight(layout: Layout, stage: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches in flight in each chunk of a stage when it holds the most.

    One chunk (1F1B): a stage runs ahead by the stages behind it. Interleaved: it runs ahead by twice that, and by one
    round of `pipeline` microbatches for every chunk but the last; microbatches enter the chunks in such rounds.

    Of eight microbatches on four stages, stages 0 to 3 hold 4, 3, 2 and 1. With two chunks a stage they hold (7, 4),
    (5, 4), (4, 3) and (4, 1), of chunks half as long: stage 0 runs 2 x 3 + 4 = 10 ahead, and computes an eleventh.
    """
    pipeline, chunks = layout.pipeline, layout.virtual_pipeline
    if chunks == 1:
        return (min(pipeline - stage, microbatches),)
    ahead = 2 * (pipeline - stage - 1) + (chunks - 1) * pipeline
    rounds, remainder = divmod(min(ahead + 1, microbatches * chunks), pipeline * chunks)
    return tuple(rounds * pipeline + min(max(remainder - chunk * pipeline, 0), pipeline) for chunk in range(chunks))
