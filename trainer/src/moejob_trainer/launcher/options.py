"""Options of a launcher besides its pod's environment; the defaults are those of a pod."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moejob_api.contract.pods import PodPath
from moejob_trainer.runtime.start_timing import process_began_at


@dataclass(frozen=True, slots=True)
class Options:
    """For `moejob run` and tests to change, by argument or in code; never by environment."""

    # `module:function` of a rank; the function takes nothing and returns an exit code.
    target: str = "moejob_trainer.rank:main"
    # What the fork server imports before the first rank starts; what is not installed is left out.
    preload: tuple[str, ...] = ("torch", "moejob_trainer.megatron", "transformers", "moejob_trainer.rank")
    last_word: Path = Path(PodPath.TERMINATION)
    # Where each rank's output is kept as rank-N.log besides the pod's own log; absent: nowhere.
    logs: Path | None = None
    # A pod without heartbeats for this long is lost.
    lost_seconds: float = 15.0
    # A fork server that neither computes nor reads for this long while it imports hangs.
    idle_import_seconds: float = 300.0
    # When the process began, on the monotonic clock.
    began_at: float = field(default_factory=process_began_at)
