"""The plan of a job together with a profile from a file. Apart, so that other plans wait for no import of it."""

from __future__ import annotations

from collections.abc import Sequence

from moejob_api.profiles.reading import merge_job_file, read_profile_file
from moejob_cli.inputs import PlannedJob, plan_read_job


def plan_with_profile(
    file: str, profile_file: str, settings: Sequence[str] = (), available_gpus: int | None = None
) -> PlannedJob:
    """Return the plan of the job in a file, changed by --set and merged with the profile in another."""
    merged = merge_job_file(file, read_profile_file(profile_file), tuple(settings))
    return plan_read_job(merged.job, available_gpus, merged.profile)
