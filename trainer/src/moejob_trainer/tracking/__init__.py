"""Trackers that receive a run's metrics beside its own step log. None of them can stop or delay a run."""

from moejob_trainer.tracking.backends import TrackedRun, TrackerBackend
from moejob_trainer.tracking.background import Background
from moejob_trainer.tracking.tracker import Tracker, tracker

__all__ = ["Background", "TrackedRun", "Tracker", "TrackerBackend", "tracker"]
