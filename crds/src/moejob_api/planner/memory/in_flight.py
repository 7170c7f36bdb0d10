"""Microbatches whose activations a pipeline stage holds at once, chunk by chunk, under Megatron's two schedules."""

from __future__ import annotations

from moejob_api.layout.sizes import Layout


def in_flight(layout: Layout, stage: int, microbatches: int) -> tuple[int, ...]:
    """Microbatches in flight in each chunk of a stage when it holds the most.

    One chunk (1F1B): a stage runs ahead by the stages behind it. Interleaved: it runs ahead by twice that, and by one
    round of `pipeline` microbatches for every chunk but the last; microbatches enter the chunks in such rounds.
    """
    pipeline, chunks = layout.pipeline, layout.virtual_pipeline
    if chunks == 1:
        return (min(pipeline - stage, microbatches),)
    ahead = 2 * (pipeline - stage - 1) + (chunks - 1) * pipeline
    rounds, rest = divmod(min(ahead + 1, microbatches * chunks), pipeline * chunks)
    return tuple(rounds * pipeline + min(max(rest - chunk * pipeline, 0), pipeline) for chunk in range(chunks))
