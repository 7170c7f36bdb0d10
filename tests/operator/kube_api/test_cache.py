"""The cache, of objects seen in any order."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.contract.pods import Label
from moejob_operator.actions import Kind
from moejob_operator.cluster import JobKey
from moejob_operator.kube_api.cache import Cache, slim_object
from stand_in_api import stored_object

KEY = JobKey("default", "job")


def pod(version: int, name: str = "job-trainer-0-00000", uid: str = "1", job: str | None = "job") -> dict[str, Any]:
    labels = {} if job is None else {Label.JOB.value: job}
    return stored_object("Pod", name, version, labels=labels, metadata={"uid": uid})


def versions(cache: Cache, key: JobKey = KEY) -> list[str]:
    return [found["metadata"]["resourceVersion"] for found in cache.find_children(key).pods]


def test_an_object_belongs_to_the_job_its_label_names() -> None:
    cache = Cache()
    assert cache.record_object(Kind.POD, pod(1)) == KEY
    assert cache.record_object(Kind.POD, pod(2, "other", uid="2", job="other")) == JobKey("default", "other")
    assert versions(cache) == ["1"]


def test_an_object_that_names_no_job_is_nobodys() -> None:
    cache = Cache()
    assert cache.record_object(Kind.POD, pod(1, job=None)) is None
    assert cache.record_deletion(Kind.POD, pod(1, job=None)) is None
    assert cache.all_keys() == []


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param([1, 2], ["2"], id="a newer version replaces an older one"),
        pytest.param([2, 1], ["2"], id="an older one comes too late"),
        pytest.param([9, 10], ["10"], id="versions are numbers, not text"),
    ],
)
def test_the_newer_version_stays(seen: list[int], expected: list[str]) -> None:
    cache = Cache()
    for version in seen:
        cache.record_object(Kind.POD, pod(version))
    assert versions(cache) == expected


def test_an_event_that_tells_what_is_known_already_is_kept_whole_and_is_no_news() -> None:
    cache = Cache()
    written, whole = pod(1), pod(1) | {"status": {"phase": "Pending"}}
    assert cache.record_object(Kind.POD, written) == KEY
    assert cache.record_object(Kind.POD, whole) is None
    [known] = cache.find_children(KEY).pods
    assert known["status"] == {"phase": "Pending"}


def test_what_was_deleted_does_not_come_back_by_an_answer_that_was_slow() -> None:
    cache = Cache()
    cache.record_object(Kind.POD, pod(1))
    assert cache.record_deletion(Kind.POD, pod(3)) == KEY
    assert cache.record_object(Kind.POD, pod(2)) is None
    assert versions(cache) == []


def test_one_of_the_same_name_that_came_later_is_another_object() -> None:
    cache = Cache()
    cache.record_object(Kind.POD, pod(5, uid="new"))
    cache.record_deletion(Kind.POD, pod(4, uid="old"))
    assert versions(cache) == ["5"]


def test_a_list_ends_what_is_older_and_not_in_it() -> None:
    cache = Cache()
    cache.record_object(Kind.POD, pod(1, "kept", "1"))
    cache.record_object(Kind.POD, pod(2, "vanished", "2"))
    cache.record_object(Kind.POD, pod(9, "created since", "3"))
    cache.record_list(Kind.POD, KEY, [pod(1, "kept", "1"), pod(4, "never seen", "4")], at_version=5)
    assert {found["metadata"]["name"] for found in cache.find_children(KEY).pods} == {
        "kept",
        "created since",
        "never seen",
    }


def test_a_job_that_nothing_is_left_of_is_forgotten() -> None:
    cache = Cache()
    cache.record_object(Kind.JOB, stored_object("MoETrainingJob", "job"))
    cache.record_object(Kind.POD, pod(1))
    assert cache.all_keys() == [KEY]
    cache.record_deletion(Kind.JOB, stored_object("MoETrainingJob", "job"))
    assert (cache.find_job(KEY), cache.all_keys()) == (None, [KEY])
    cache.record_deletion(Kind.POD, pod(1))
    assert cache.all_keys() == []


def test_a_deletion_is_remembered_for_as_long_as_an_answer_may_be_late_and_no_longer() -> None:
    now = iter((0.0, 69.0, 71.0))
    cache = Cache(request_seconds=10, clock=lambda: next(now))
    for uid in ("first", "second", "third"):
        cache.record_deletion(Kind.POD, pod(9, uid=uid))
    assert list(cache._deleted) == ["second", "third"]  # noqa: SLF001
    assert cache.record_object(Kind.POD, pod(1, uid="second")) is None


def test_ten_thousand_pods_that_go_at_once_all_stay_gone() -> None:
    cache = Cache()
    for number in range(10_000):
        cache.record_deletion(Kind.POD, pod(number, uid=str(number)))
    assert [cache.record_object(Kind.POD, pod(1, uid=str(number))) for number in range(10_000)] == [None] * 10_000


def test_an_object_is_found_by_its_name() -> None:
    cache = Cache()
    cache.record_object(Kind.POD, pod(1, "a"))
    found = cache.find_object(Kind.POD, "default", "a")
    assert found is not None
    assert found["metadata"]["name"] == "a"
    assert cache.find_object(Kind.SERVICE, "default", "a") is None
    assert cache.find_object(Kind.POD, "elsewhere", "a") is None
    cache.record_deletion(Kind.POD, pod(2, "a"))
    assert cache.find_object(Kind.POD, "default", "a") is None


def test_only_what_somebody_reads_is_kept() -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": "...", "mine": "1"}
    raw = {
        "metadata": {"name": "x", "managedFields": ["..."], "annotations": annotations},
        "spec": {"nodeName": "node-1", "containers": [{"env": ["..."]}]},
        "status": {"phase": "Running"},
    }
    kept = slim_object(Kind.POD, raw)
    assert kept["spec"] == {"nodeName": "node-1"}
    assert kept["status"] == {"phase": "Running"}
    assert kept["metadata"] == {"name": "x", "annotations": {"mine": "1"}}


def test_the_spec_of_a_job_is_kept_whole() -> None:
    job = stored_object("MoETrainingJob", "job", spec={"model": {"source": "x"}})
    assert slim_object(Kind.JOB, job)["spec"] == job["spec"]


@given(seed=st.integers(0, 2**32), objects=st.integers(1, 4), changes=st.integers(0, 25))
def test_whatever_is_repeated_late_or_in_disorder_the_end_is_the_truth(seed: int, objects: int, changes: int) -> None:
    """Every event arrives at least once, any of them again and in any order, and a list at the end."""
    chance = random.Random(seed)
    truth: dict[str, dict[str, Any]] = {}
    events: list[tuple[bool, dict[str, Any]]] = []
    for version in range(1, changes + 1):
        name = f"pod-{chance.randrange(objects)}"
        if name in truth and chance.random() < 0.4:
            gone = truth.pop(name)
            events.append((True, pod(version, name, gone["metadata"]["uid"])))
        else:
            uid = truth[name]["metadata"]["uid"] if name in truth else f"{name}-{version}"
            truth[name] = pod(version, name, uid)
            events.append((False, truth[name]))
    received = events + chance.choices(events, k=len(events)) if events else []
    chance.shuffle(received)
    cache = Cache()
    for is_gone, raw in received:
        (cache.record_deletion if is_gone else cache.record_object)(Kind.POD, raw)
    cache.record_list(Kind.POD, KEY, truth.values(), at_version=changes)
    assert {found["metadata"]["name"]: found["metadata"] for found in cache.find_children(KEY).pods} == {
        name: raw["metadata"] for name, raw in truth.items()
    }
