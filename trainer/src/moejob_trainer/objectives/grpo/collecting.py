"""Rank 0's part of a step: prompts in, rewarded rollouts out, and their metrics and samples.

Which groups stay, and which are replaced because all their rewards are equal: sampling.py. Which groups are asked for
while ranks learn from others: group_queue.py.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from moejob_api.job.grpo import Grpo
from moejob_trainer.data.prompt_loader import NumberedPrompt, PromptLoader
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.objectives import ObjectiveState
from moejob_trainer.objectives.grpo.group_queue import GroupQueue, QueueContents
from moejob_trainer.objectives.grpo.rollout_batch import RolloutBatch, build_rollout, build_rollout_batch
from moejob_trainer.objectives.grpo.sampling import AnswerGroup, GroupSampler, SampledGroups
from moejob_trainer.objectives.grpo.saved_groups import (
    pack_groups,
    prompt_rows,
    read_prompt_rows,
    sampling_fingerprint,
    unpack_groups,
)
from moejob_trainer.objectives.grpo.step_metrics import (
    evaluation_metrics,
    queue_metrics,
    reward_metrics,
    sample_lines,
    version_metrics,
)
from moejob_trainer.rollouts.interface import SamplingParams
from moejob_trainer.runtime.disk import Disk, write_lines
from moejob_trainer.runtime.loop_thread import LoopThread
from moejob_trainer.runtime.user_lines import to_stderr

T = TypeVar("T")
# Answers of each step that the log shows.
_SHOWN = 2
_SAMPLES = "samples"
_UNFINISHED, _SAMPLING = "unfinishedPrompts", "samplingSettings"
# Numbers of evaluation prompts are below every training prompt's: their seeds are never the same.
_EVALUATION = -(2**31)


@dataclass(frozen=True, slots=True)
class PromptSets:
    """The prompts of training, drawn in turn, and the prompts of an evaluation, which engines get all at once."""

    training: PromptLoader
    evaluation: Sequence[Prompt] = ()


class RolloutCollector:
    """Rank 0's source of rollouts. One event loop lasts the whole run: engines and rewards work while the rank learns.

    `prompts` and the metrics belong to the main thread, the queue to the loop.
    """

    def __init__(
        self,
        grpo: Grpo,
        sampler: GroupSampler,
        prompts: PromptSets,
        params: SamplingParams,
        folder: Path,
    ) -> None:
        self._grpo, self._sampler, self._prompts, self._folder = grpo, sampler, prompts, folder
        self._params = params
        self._loop = sampler.loop or LoopThread("rewards")
        self._queue = GroupQueue(grpo, prompts.training, self._sample_group)
        # Groups of a checkpoint, which the first step of this start continues with.
        self._restored: QueueContents | None = None
        # The request that was under way when engines lost the weights.
        self._unfinished_request: asyncio.Task[Any] | None = None
        self._last_sampled = SampledGroups(())
        self._metrics: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._loop.run(self._sampler.scorer.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._cancel_requests())
        self._loop.run(self._sampler.scorer.__aexit__(kind, error, trace))
        self._loop.close()

    @property
    def last_sampled(self) -> SampledGroups:
        """Return the groups of the last step, with the groups that it leaves out."""
        return self._last_sampled

    @property
    def epoch(self) -> float:
        """Return the passes over the training prompts so far."""
        return self._prompts.training.epoch

    def collect_rollouts(self, step: int) -> RolloutBatch | None:
        """Return the rollouts of a step, without groups of failed rewards.

        None when engines lost the weights, or when the run is asked to stop.
        """
        scorer = self._sampler.scorer
        sampled = self._run_request(lambda: self._take_groups(step))
        if sampled is None:
            return None
        if not sampled.groups:
            raise scorer.no_groups_error(f"every group of step {step + 1}")
        # The batch has the experts of all tokens; a second copy in these groups would double their memory.
        self._last_sampled = sampled.without_routing()
        self._metrics = reward_metrics(sampled, scorer.names) | version_metrics(sampled.groups, step)
        self._metrics |= queue_metrics(sampled)
        self._metrics |= {f"rewardFailures/{name}": float(count) for name, count in scorer.failures.items()}
        self._log_failures()
        scorer.forget_failures()
        flat = [answer for group in sampled.groups for answer in group.answers]
        return build_rollout_batch(
            [build_rollout(scored_answer.answer) for scored_answer in flat], [each.reward for each in flat]
        )

    def evaluate(self) -> Mapping[str, float] | None:
        """Return mean@k and pass@k over all evaluation prompts."""
        settings = self._grpo.evaluation
        params = replace(
            self._params,
            temperature=settings.temperature or self._grpo.temperature,
            top_p=settings.top_p,
            # Nothing is learned from these answers.
            routing=None,
        )
        numbered = [NumberedPrompt(_EVALUATION + n, prompt) for n, prompt in enumerate(self._prompts.evaluation)]

        async def sample_all() -> Any:
            return await asyncio.gather(
                *(self._sampler.sample_group(prompt, settings.samples, params, self._grpo) for prompt in numbered)
            )

        weights = [reward.weight for reward in self._grpo.rewards]
        groups = self._run_request(sample_all)
        if groups is None:
            return None
        if self._grpo.rollout.staleness == 0:
            # No step waits for answers that were scored beside the evaluation's.
            self._sampler.scorer.forget_failures()
        return evaluation_metrics(groups, dict(zip(self._sampler.scorer.names, weights, strict=True)))

    def give_up_request(self) -> None:
        """Return the groups that an unfinished request has taken to the queue, for the next checkpoint."""
        self._loop.run(self._give_up_request())

    def log_samples(self, step: int, advantages: Sequence[float]) -> None:
        """Write the answers of a step to samples/step-N.jsonl, and a few to the log."""
        # The step log numbers a step by the steps that are done at its end.
        step_number = step + 1
        lines = list(sample_lines(self._last_sampled, advantages, step_number, max(self._grpo.logged_answers, _SHOWN)))
        for line in lines[:_SHOWN]:
            sys.stdout.write(f"{line}\n")
        if self._grpo.logged_answers:
            path = self._folder / _SAMPLES / f"step-{step_number}.jsonl"
            write_lines(Disk(), path, lines[: self._grpo.logged_answers])

    def metrics(self) -> Mapping[str, float]:
        """Return the last step's rewards, versions and failures of rewards."""
        return self._metrics

    def measure_idle_share(self) -> float:
        """Return the share of time since the last call in which engines had nothing to compute."""
        return self._sampler.generator.measure_idle_share()

    def snapshot_state(self) -> ObjectiveState:
        """Return the place in the prompts, and all groups that were asked for and that no step has trained on."""
        contents = self._loop.run(self._read_contents())
        entries = dict(self._prompts.training.state_dict())
        if contents.unfinished:
            entries[_UNFINISHED] = prompt_rows(contents.unfinished)
        if contents.finished:
            entries[_SAMPLING] = sampling_fingerprint(self._grpo, self._params)
        return ObjectiveState(entries, pack_groups(contents.finished))

    def load_state(self, state: ObjectiveState) -> None:
        """Continue with these groups, and behind the last prompt that was drawn."""
        loader = self._prompts.training
        loader.load_state_dict(state.entries)
        unfinished = read_prompt_rows(state.entries.get(_UNFINISHED, ()), loader.read_again)
        finished = unpack_groups(state.arrays, loader.read_again, time.monotonic())
        if finished and state.entries.get(_SAMPLING) != sampling_fingerprint(self._grpo, self._params):
            to_stderr(
                f"{len(finished)} groups of the checkpoint were sampled or rewarded with other settings than this "
                "job's; their prompts are asked again"
            )
            unfinished, finished = (*unfinished, *(each.group.prompt for each in finished)), []
        self._restored = QueueContents(finished, unfinished)

    async def _read_contents(self) -> QueueContents:
        return self._restored or self._queue.list_contents()

    async def _sample_group(self, prompt: NumberedPrompt, attempt: int) -> AnswerGroup:
        return await self._sampler.sample_group(prompt, self._grpo.group_size, self._params, self._grpo, attempt)

    async def _take_groups(self, step: int) -> SampledGroups:
        if self._restored is not None:
            contents, self._restored = self._restored, None
            self._queue.restore_contents(contents, step)
        return await self._queue.take_groups(step)

    async def _give_up_request(self) -> None:
        request, self._unfinished_request = self._unfinished_request, None
        if request is not None:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    async def _cancel_requests(self) -> None:
        self._queue.cancel_requests()
        if self._unfinished_request is not None:
            self._unfinished_request.cancel()

    def _run_request(self, start_request: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the reply of engines; None instead of a longer wait: the next call waits for the same request."""
        is_done = self._loop.run(self._finishes_in_time(start_request))
        if not is_done or self._unfinished_request is None:
            return None
        request, self._unfinished_request = self._unfinished_request, None
        result: T = request.result()
        return result

    async def _finishes_in_time(self, start_request: Callable[[], Coroutine[Any, Any, T]]) -> bool:
        if self._unfinished_request is None:
            self._unfinished_request = asyncio.get_running_loop().create_task(start_request())
        request = self._unfinished_request
        interruption = asyncio.ensure_future(self._sampler.generator.wait_for_interruption())
        try:
            await asyncio.wait({request, interruption}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interruption.cancel()
        return request.done()

    def _log_failures(self) -> None:
        for name, count in self._sampler.scorer.failures.items():
            kinds = ", ".join(f"{kind} {times}" for kind, times in self._sampler.scorer.kinds[name].most_common())
            reason = self._sampler.scorer.last_failure[name]
            sys.stderr.write(
                f"reward {name} failed for {count} answers ({kinds}), their groups are left out: {reason}\n"
            )
