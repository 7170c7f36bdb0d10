"""A job that its own pods refuse: the status says first what is wrong with the job, and what mends it."""

from __future__ import annotations

from fake_world import World
from moejob_api.contract.pods import ExitCode, PodOutcome, TerminationMessage
from moejob_api.job.status import ConditionType, Phase

SENTENCE = "spec.parallelism.tensor: 3 does not divide 8 heads; change tensor to 2"


def test_the_sentence_about_the_job_comes_before_the_pod_that_said_it() -> None:
    world = World()
    world.apply()
    world.settle()
    world.run()
    world.settle()
    code = ExitCode.BAD_CONFIGURATION.value
    world.end_pod(
        1, code, TerminationMessage(outcome=PodOutcome.BAD_CONFIGURATION, message=SENTENCE, rank=5, exit_code=code)
    )
    world.settle()
    assert world.status.phase is Phase.FAILED
    assert world.message(ConditionType.FAILED).startswith(SENTENCE)
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.message, failure.pod, failure.exit_code) == (SENTENCE, "job-trainer-0-00001", code)
