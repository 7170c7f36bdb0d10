"""The MoETrainingJob as frozen models, one file a topic: types, bounds and defaults. Rules live in moejob_api.rules.

The models are built when they are first named: a command that lists jobs needs names and status alone, and would wait
0.1 s for the rest.
"""

from typing import TYPE_CHECKING

from moejob_api.job.names import API_VERSIONS, BETA_VERSION, GROUP, KIND, MAX_NAME, PLURAL, VERSION

if TYPE_CHECKING:
    from moejob_api.job.job import Metadata, Method, MoETrainingJob, Spec

__all__ = [
    "API_VERSIONS",
    "BETA_VERSION",
    "GROUP",
    "KIND",
    "MAX_NAME",
    "PLURAL",
    "VERSION",
    "Metadata",
    "Method",
    "MoETrainingJob",
    "Spec",
]


def __getattr__(name: str) -> object:
    """Import a model that is named for the first time."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moejob_api.job import job  # noqa: PLC0415 this is where they are built

    globals()[name] = value = getattr(job, name)
    return value
