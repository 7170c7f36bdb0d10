"""Trackers that receive a run's metrics beside its own step log. None of them can stop or delay a run."""

from moejob_trainer.tracking.backends import TrackedRun, TrackerBackend
from moejob_trainer.tracking.background import BackgroundBackend
from moejob_trainer.tracking.tracker import Tracker, open_tracker

__all__ = ["BackgroundBackend", "TrackedRun", "Tracker", "TrackerBackend", "open_tracker"]
