"""The rewards of a run, on rank 0: they start before the model is loaded, and score once before the wait for engines.

So a module that cannot be imported ends the run within seconds, before engines have started and generated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from moejob_trainer.distributed.encoding import INTEGER
from moejob_trainer.objectives.grpo.collecting import PromptSets
from moejob_trainer.rewards.first_completion import made_up_completion, tolerated_failures
from moejob_trainer.rewards.scorer import Scorer
from moejob_trainer.runtime.heartbeats import BackgroundHeartbeat, Heartbeat
from moejob_trainer.runtime.loop_thread import LoopThread
from moejob_trainer.setup.context import RankContext


@dataclass(frozen=True, slots=True)
class RunRewards:
    """The rewards with the event loop in which their processes were started."""

    loop: LoopThread
    scorer: Scorer

    def close(self) -> None:
        """End the processes of rewards; the collector of a run may have done so already."""
        if self.scorer.is_started:
            self.loop.run(self.scorer.__aexit__())
        self.loop.close()


@contextmanager
def start_rewards(context: RankContext) -> Iterator[RunRewards | None]:
    """Start the rewards of a GRPO run on rank 0 and wait for their imports; a failure is raised on every rank."""
    grpo = context.spec.grpo
    if grpo is None:
        yield None
        return
    rewards = RunRewards(LoopThread("rewards"), Scorer(grpo.rewards, grpo.reward_failure))

    def start_scorer() -> int:
        # Heartbeats continue: a waiting rank does not hang, and imports have a time limit of their own.
        with BackgroundHeartbeat(Heartbeat.for_rank()):
            rewards.loop.run(rewards.scorer.__aenter__())
            rewards.loop.run(rewards.scorer.wait_until_ready())
        return len(grpo.rewards)

    try:
        context.on_first_rank(start_scorer, INTEGER)
        yield rewards
    finally:
        rewards.close()


def try_rewards(context: RankContext, rewards: RunRewards | None, sets: PromptSets | None) -> None:
    """Score a made-up answer to the first prompt on rank 0: a reward that always fails does so before engines start."""
    grpo = context.spec.grpo
    if grpo is None or rewards is None:
        return

    def try_sample() -> int:
        if sets is None:
            raise ValueError("rank 0 has the prompts")
        sample = made_up_completion(grpo, sets.training.peek_prompt())
        with BackgroundHeartbeat(Heartbeat.for_rank()):
            failures = rewards.loop.run(rewards.scorer.try_completion(sample))
        for line in tolerated_failures(failures, grpo.reward_failure):
            sys.stderr.write(f"{line}\n")
        return len(failures)

    context.on_first_rank(try_sample, INTEGER)
