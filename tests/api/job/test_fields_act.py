"""Every field of a job is read by code that acts on it: nothing is accepted, estimated or refused, then forgotten."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from api.job.field_readers import Read, Readers, fields, readers

# A field that only these read changes what is said about a job, never what it does.
PLANNING = (
    "crds/src/moejob_api/crd/",
    "crds/src/moejob_api/documents/",
    "crds/src/moejob_api/planner/",
    "crds/src/moejob_api/rules/",
    "crds/src/moejob_api/models/trainable.py",
)
# The operator makes pods of it.
ACTING = "crds/src/moejob_api/planner/pod_resources.py"
# Fields that no accepted job may give, each with the reason.
REFUSED: Mapping[Read, str] = {}


@pytest.fixture(scope="module")
def found() -> Readers:
    return readers()


def idle(found: Readers, without: str = "") -> set[Read]:
    """Fields that no code acts on, were there no file of that name."""
    return {field for field in fields() if not any(_acts(file, without) for file in found.get(field, ()))}


def _acts(file: str, without: str) -> bool:
    if without and file.endswith(without):
        return False
    return file == ACTING or not file.startswith(PLANNING)


def test_every_field_acts_or_is_refused(found: Readers) -> None:
    assert idle(found) == REFUSED.keys()


@pytest.mark.parametrize(
    ("file", "field"),
    [
        ("training/learning_rate.py", ("Scheduler", "minimum_learning_rate")),
        ("objectives/grpo/sampling.py", ("DynamicSampling", "over_sampling")),
        ("children/placement.py", ("Toleration", "toleration_seconds")),
        ("planner/pod_resources.py", ("Resources", "qos_class")),
        ("derived.py", ("MoE", "freeze_router")),
    ],
)
def test_a_field_whose_only_reader_goes_is_noticed(found: Readers, file: str, field: Read) -> None:
    assert field in idle(found, without=file)
