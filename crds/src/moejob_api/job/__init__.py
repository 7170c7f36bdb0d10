"""The MoETrainingJob as frozen models, one file a topic: types, bounds and defaults. Rules live in moejob_api.rules."""

from moejob_api.job.job import (
    API_VERSIONS,
    BETA_VERSION,
    GROUP,
    KIND,
    MAX_NAME,
    PLURAL,
    VERSION,
    Metadata,
    Method,
    MoETrainingJob,
    Spec,
)

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
