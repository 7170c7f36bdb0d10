"""The phase of a job, which a program can read without a model of the status."""

from enum import StrEnum


class Phase(StrEnum):
    """The phase of a job."""

    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def is_finished(self) -> bool:
        """Return whether nothing more will happen to the job."""
        return self in (Phase.SUCCEEDED, Phase.FAILED)
