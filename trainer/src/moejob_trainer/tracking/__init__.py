"""Where the numbers of a run are sent, beside its own step log. Nothing in here can stop or delay a run."""

from moejob_trainer.tracking.background import Background
from moejob_trainer.tracking.sinks import Sink, TrackedRun
from moejob_trainer.tracking.tracker import Tracker, tracker

__all__ = ["Background", "Sink", "TrackedRun", "Tracker", "tracker"]
