"""The reasons of a job's phase: what conditions and events of the operator name."""

from enum import StrEnum


class Reason(StrEnum):
    """The reason of a job's phase; part of conditions and events."""

    # Pending
    STARTING = "Starting"
    QUEUED = "Queued"
    UNSCHEDULABLE = "Unschedulable"
    CLAIM_PENDING = "ClaimPending"
    CLAIM_LOST = "ClaimLost"
    QUOTA_EXCEEDED = "QuotaExceeded"
    CREATION_REFUSED = "CreationRefused"
    DELETION_REFUSED = "DeletionRefused"
    GANG_API_MISSING = "GangApiMissing"
    NAME_TAKEN = "NameTaken"
    PROFILE_MISSING = "ProfileMissing"
    PROFILE_TAKEN = "ProfileTaken"
    INVALID = "Invalid"
    # Restarting
    BACKING_OFF = "BackingOff"
    OLD_PODS_LEFT = "OldPodsLeft"
    GANG_RESTARTED = "GangRestarted"
    PODS_REPLACED = "PodsReplaced"
    # Running
    ALL_PODS_RUN = "AllPodsRun"
    POD_ENDING = "PodEnding"
    LOST_PEERS = "LostPeers"
    SECRET_LOST = "SecretLost"
    ENGINE_ENDS = "EngineEnds"
    # Suspended
    SUSPENDED = "SuspendRequested"
    # The end
    COMPLETED = "Completed"
    STOPPED_EARLY = "StoppedEarly"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    BAD_CONFIGURATION = "BadConfiguration"
