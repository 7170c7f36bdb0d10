"""Every story leads to the obstacle that a person would name, and to advice that names fields which there are."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import pytest

from diagnosis_bodies import GPU, NOW, failed_job, job, pod, unschedulable
from diagnosis_stories import STORIES, Story
from moejob_api.diagnosis.blockers import ADVICE, Blocker, Urgency
from moejob_api.diagnosis.diagnose import diagnose_job, keep_diagnosis
from moejob_api.diagnosis.reading import read_evidence
from moejob_api.job.fields import job_fields
from moejob_api.job.status import Diagnosis

# Obstacles that no message of ours has in a form of its own yet, or that need what no story here shows.
SEEN_NOWHERE = {Blocker.HUB_REFUSED, Blocker.HUB_AWAY, Blocker.TOPOLOGY_SPREAD, Blocker.UNSCHEDULABLE}
_NOW = datetime.fromisoformat(NOW)


def diagnose(story: Story, now: datetime = _NOW) -> Diagnosis | None:
    return diagnose_job(read_evidence(story.job, story.objects), now)


@pytest.mark.parametrize("story", [pytest.param(story, id=story.sentence) for story in STORIES])
def test_a_job_is_diagnosed(story: Story) -> None:
    diagnosis = diagnose(story)
    assert (None if diagnosis is None else diagnosis.blocker) == story.blocker
    assert ("" if diagnosis is None else diagnosis.message) == story.message


@pytest.mark.parametrize("story", [pytest.param(story, id=story.sentence) for story in STORIES])
def test_a_diagnosis_reads_the_same_an_hour_later(story: Story) -> None:
    """But for what only time shows: a silence that is too long."""
    later, now = diagnose(story, _NOW + timedelta(hours=1)), diagnose(story)
    if story.blocker not in (Blocker.STARTING, Blocker.POD_ENDING):
        assert keep_diagnosis(now, later) == now


def test_every_obstacle_has_advice_and_a_story() -> None:
    assert set(ADVICE) == set(Blocker)
    assert {story.blocker for story in STORIES} == (set(Blocker) - SEEN_NOWHERE) | {None}
    assert len({story.sentence for story in STORIES}) == len(STORIES) >= 40


@pytest.mark.parametrize("blocker", Blocker)
def test_advice_names_fields_that_there_are(blocker: Blocker) -> None:
    spec = job_fields().fields["spec"]
    sections = "|".join(spec.fields)
    text = f"{ADVICE[blocker].next} {ADVICE[blocker].fix}"
    paths = re.findall(rf"(?<![\w./])((?:{sections})\.[a-z]\w+)", text)
    assert [path for path in paths if spec.find_field(path) is None] == []
    assert set(re.findall(r"(?<!\{)\{(\w+)\}", text)) <= {"job", "namespace", "object"}


@pytest.mark.parametrize("blocker", [found for found in Blocker if ADVICE[found].urgency is Urgency.NEEDS_CHANGE])
def test_what_no_wait_ends_has_something_to_do(blocker: Blocker) -> None:
    assert "no action" not in ADVICE[blocker].fix


def test_nodes_that_come_and_go_write_nothing() -> None:
    texts = [
        f"0/{count} nodes are available: 1 node(s) had untolerated taint {{a: b}}, {count - 1} Insufficient {GPU}."
        for count in (5, 6, 900)
    ]
    diagnoses = [
        diagnose_job(read_evidence(job(), (pod(0, unschedulable(text)),)), _NOW + timedelta(minutes=count))
        for count, text in enumerate(texts)
    ]
    assert len(set(diagnoses)) == 1


def test_an_image_that_is_pulled_again_and_again_is_one_obstacle_since_its_beginning() -> None:
    cause = 'failed to pull and unpack image "x:1": not found'
    first, second = (
        diagnose_job(read_evidence(job(), (pod(waiting={"reason": reason, "message": text}, node="gpu-1"),)), _NOW)
        for reason, text in (
            ("ErrImagePull", cause),
            ("ImagePullBackOff", f'Back-off pulling image "x:1": ErrImagePull: {cause}'),
        )
    )
    assert first == second


def test_a_diagnosis_with_another_meaning_has_its_own_beginning() -> None:
    first, second = (
        diagnose(next(story for story in STORIES if story.blocker is blocker))
        for blocker in (Blocker.TAINT, Blocker.NO_NODES)
    )
    assert keep_diagnosis(first, second) == second
    assert keep_diagnosis(None, second) == second
    assert keep_diagnosis(first, None) is None


def test_what_follows_depends_on_whether_the_job_has_failed_or_starts_again() -> None:
    failure = {"pod": "job-trainer-0-00000", "message": "[Errno 28] No space left on device"}
    again = job("Restarting", failure=failure | {"reason": "RankFailed"})
    over = failed_job("BadConfiguration", "full", failure | {"reason": "BadConfiguration", "exitCode": 78})
    restarted, failed = (diagnose_job(read_evidence(body, ()), _NOW) for body in (again, over))
    assert restarted is not None
    assert failed is not None
    assert restarted.blocker == failed.blocker == Blocker.DISK_FULL
    assert restarted.next.startswith("the operator starts the run again")
    assert failed.next == "nothing follows: the job has failed"
