"""The groups of a run from their prompts to the steps that take them, on rank 0.

Lives in the event loop of the rewards, where engines answer and rewards score while the ranks learn. Which groups may
be asked for, and which a step takes: admission.py. All methods are called in that loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moejob_api.job.grpo import Grpo
from moejob_trainer.data.prompt_loader import NumberedPrompt, PromptLoader
from moejob_trainer.objectives.grpo.admission import (
    AdmissionLimits,
    StepPlaces,
    askable_groups,
    awaited_groups,
    split_feasible,
    takeable_group,
)
from moejob_trainer.objectives.grpo.sampling import (
    AnswerGroup,
    FinishedGroup,
    SampledGroups,
    compose_step,
    left_out_reason,
    most_prompts_per_step,
)
from moejob_trainer.runtime.user_lines import to_stderr

# A step does not wait once more for a prompt that has taken answerTimeoutSeconds this often.
_MOST_ATTEMPTS = 5

# Starts the requests of a group; the second argument counts earlier attempts.
SampleGroup = Callable[[NumberedPrompt, int], Coroutine[Any, Any, AnswerGroup]]


class GroupTimeout(RuntimeError):
    """A step that has waited for one group for too long, again and again."""


@dataclass(frozen=True, slots=True)
class QueueContents:
    """The groups that were asked for and that no step has taken: all that a checkpoint holds of them."""

    finished: Sequence[FinishedGroup] = ()
    unfinished: Sequence[NumberedPrompt] = ()


@dataclass(slots=True, eq=False)
class _RunningGroup:
    """A group whose answers are on their way."""

    prompt: NumberedPrompt
    version: int
    task: asyncio.Task[AnswerGroup]
    asked_at: float
    attempt: int = 0

    @property
    def number(self) -> int:
        return self.prompt.number

    @property
    def is_complete(self) -> bool:
        return self.task.done()


class GroupQueue:
    """Asks for groups as far ahead as staleness allows, and gives each step the oldest that are complete."""

    def __init__(self, grpo: Grpo, prompts: PromptLoader, sample: SampleGroup) -> None:
        self._grpo, self._prompts, self._sample = grpo, prompts, sample
        self._limits = AdmissionLimits(grpo.rollout.staleness, grpo.prompts_per_step, most_prompts_per_step(grpo))
        self._timeout_seconds = float(grpo.rollout.answer_timeout_seconds)
        self._pending: dict[int, FinishedGroup | _RunningGroup] = {}
        # Prompts that an earlier start has drawn and that no step has taken.
        self._owed: deque[NumberedPrompt] = deque()
        self._places = StepPlaces(-1)
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    def list_contents(self) -> QueueContents:
        """Return the groups that no step has taken, in the order of their prompts."""
        entries = [self._pending[number] for number in sorted(self._pending)]
        finished = [group for group in map(_as_finished, entries) if group is not None]
        numbers = {group.number for group in finished}
        unfinished = [entry.prompt for entry in entries if isinstance(entry, _RunningGroup)]
        return QueueContents(finished, [*(each for each in unfinished if each.number not in numbers), *self._owed])

    def restore_contents(self, contents: QueueContents, step: int) -> None:
        """Continue with the groups of a checkpoint; unfinished ones, and those too old by now, are asked for again."""
        kept, outdated = split_feasible(self._limits, StepPlaces(step), contents.finished)
        self._pending = {group.number: group for group in kept}
        owed = [*contents.unfinished, *(group.group.prompt for group in outdated)]
        self._owed = deque(sorted(owed, key=lambda prompt: prompt.number))

    async def take_groups(self, step: int) -> SampledGroups:
        """Return the groups of a step, whose weights have been published, and ask for those of later steps.

        A step that is cancelled takes none.
        """
        self._places = StepPlaces(step)
        taken: list[FinishedGroup] = []
        awaited: set[int] = set()
        began_at, asked_again = self._loop_time(), 0
        try:
            while self._places.open_places(self._limits) > 0:
                self._ask_groups()
                self._raise_failure()
                entry = takeable_group(self._limits, self._places, list(self._pending.values()))
                if entry is None:
                    held_back = {group.number for group in self._awaited_groups()} if self._holds_complete() else set()
                    awaited |= held_back
                    await self._wait_for_change()
                    asked_again += self._ask_again()
                    continue
                taken.append(self._take_complete(entry, step - self._limits.staleness))
                is_chosen = left_out_reason(taken[-1].group, self._grpo) is None
                self._places = self._places.take_place(is_chosen=is_chosen)
        except asyncio.CancelledError:
            self._pending |= {finished.number: finished for finished in taken}
            raise
        groups = [finished.group for finished in taken]
        last_answer = max(answer.answered_at for group in groups for answer in group.answers)
        return replace(
            compose_step(groups, self._grpo),
            reward_seconds=self._loop_time() - max(began_at, last_answer),
            awaited=len(awaited),
            asked_again=asked_again,
            pending=len(self._pending),
        )

    def cancel_requests(self) -> None:
        """End all requests."""
        for entry in self._pending.values():
            if isinstance(entry, _RunningGroup):
                entry.task.cancel()

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    def _ask_groups(self) -> None:
        count = askable_groups(self._limits, self._places, len(self._pending))
        owed = [self._owed.popleft() for _ in range(min(count, len(self._owed)))]
        for prompt in (*owed, *self._prompts.next_prompts(count - len(owed))):
            self._pending[prompt.number] = self._start_group(prompt, 0)

    def _take_complete(self, entry: FinishedGroup | _RunningGroup, oldest_version: int) -> FinishedGroup:
        del self._pending[entry.number]
        finished = _as_finished(entry)
        if finished is None:
            raise ValueError(f"group {entry.number} was taken before it was complete")
        _refuse_older(finished, oldest_version)
        return finished

    def _start_group(self, prompt: NumberedPrompt, attempt: int) -> _RunningGroup:
        task = asyncio.get_running_loop().create_task(self._sample(prompt, attempt))
        task.add_done_callback(self._note_end)
        return _RunningGroup(prompt, self._places.step, task, self._loop_time(), attempt)

    def _note_end(self, task: asyncio.Task[AnswerGroup]) -> None:
        if not task.cancelled() and self._failure is None:
            self._failure = task.exception()
        self._changed.set()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _holds_complete(self) -> bool:
        return any(entry.is_complete for entry in self._pending.values())

    def _awaited_groups(self) -> Sequence[_RunningGroup]:
        entries = awaited_groups(self._limits, self._places, list(self._pending.values()))
        return [entry for entry in entries if isinstance(entry, _RunningGroup)]

    async def _wait_for_change(self) -> None:
        """Wait until a group ends, or one that the step waits for has taken too long."""
        self._changed.clear()
        give_up_at = min((self._give_up_at(entry) for entry in self._awaited_groups()), default=None)
        try:
            async with asyncio.timeout_at(give_up_at):
                await self._changed.wait()
        except TimeoutError:
            return

    def _give_up_at(self, entry: _RunningGroup) -> float:
        return entry.asked_at + self._timeout_seconds

    def _ask_again(self) -> int:
        """Ask for groups again that the step has waited for too long; return how many."""
        now = self._loop_time()
        late = [entry for entry in self._awaited_groups() if now >= self._give_up_at(entry)]
        for entry in late:
            attempt = entry.attempt + 1
            if attempt >= _MOST_ATTEMPTS and entry.version == self._places.step:
                raise GroupTimeout(
                    f"step {self._places.step + 1} needs prompt {entry.number}, whose {self._grpo.group_size} answers "
                    f"and rewards have taken more than {self._timeout_seconds:g} s {attempt} times; raise "
                    "grpo.rollout.answerTimeoutSeconds, or lower maxNewTokens"
                )
            entry.task.cancel()
            to_stderr(
                f"prompt {entry.number} is asked again: step {self._places.step + 1} waited for its answers, which "
                f"have taken more than {self._timeout_seconds:g} s"
            )
            self._pending[entry.number] = self._start_group(entry.prompt, attempt)
        return len(late)


def _as_finished(entry: FinishedGroup | _RunningGroup) -> FinishedGroup | None:
    if isinstance(entry, FinishedGroup):
        return entry
    if not entry.task.done() or entry.task.cancelled() or entry.task.exception() is not None:
        return None
    return FinishedGroup(entry.task.result(), entry.version)


def _refuse_older(finished: FinishedGroup, oldest_version: int) -> None:
    """Raise where an answer has an older token than the job allows; only an engine that errs can bring one."""
    oldest_token = min(int(answer.answer.versions.min()) for answer in finished.group.answers)
    if oldest_token < oldest_version:
        raise ValueError(
            f"an answer to prompt {finished.number}, asked for at version {finished.version}, has a token of version "
            f"{oldest_token}, and grpo.rollout.staleness allows none before {oldest_version}: its engine had other "
            "weights than it said"
        )
