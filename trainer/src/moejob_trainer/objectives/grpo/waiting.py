"""The shares of time that ranks and engines wait, and the sentence that says what would change them."""

from __future__ import annotations

from dataclasses import dataclass, field

from moejob_api.job.grpo import RolloutPlacement, RolloutSettings

# Shares below this are no reason to change a job.
_SMALL_SHARE = 0.1
# Steps that a sentence is about; the first step is left out, for in it everything starts.
_STEPS = 10


@dataclass(slots=True)
class WaitingLog:
    """Collects the shares of steps, and returns a sentence where the last ones ask for another than before."""

    settings: RolloutSettings
    _shares: list[tuple[float, float]] = field(default_factory=list)
    _step_count: int = 0
    _last_remedy: str = ""

    def add_step(self, trainer_share: float, engine_share: float) -> str | None:
        """Add the shares of one step; return a sentence for the log, None where nothing new is to be said."""
        self._step_count += 1
        if self._step_count == 1:
            return None
        self._shares.append((trainer_share, engine_share))
        if len(self._shares) < _STEPS:
            return None
        trainer_mean, engine_mean = (sum(shares) / _STEPS for shares in zip(*self._shares, strict=True))
        self._shares.clear()
        remedy = waiting_remedy(self.settings, trainer_mean, engine_mean)
        if remedy == self._last_remedy:
            return None
        self._last_remedy = remedy
        return (
            f"of the last {_STEPS} steps, ranks waited {trainer_mean:.0%} for answers, and engines had nothing to do "
            f"for {engine_mean:.0%}: {remedy}"
        )


def waiting_remedy(settings: RolloutSettings, trainer_share: float, engine_share: float) -> str:
    """Return what would shorten the longer wait; pure."""
    if max(trainer_share, engine_share) < _SMALL_SHARE:
        return "neither waits long for the other"
    if settings.staleness == 0:
        return "they take turns; grpo.rollout.staleness: 1 lets engines answer while ranks learn"
    is_colocated = settings.placement is RolloutPlacement.COLOCATED
    if trainer_share >= _SMALL_SHARE and engine_share < _SMALL_SHARE:
        return (
            "engines are the slower side; lower maxNewTokens, or give them GPUs of their own (placement: Separate)"
            if is_colocated
            else "engines are the slower side; raise grpo.rollout.replicas, or lower maxNewTokens"
        )
    if trainer_share >= _SMALL_SHARE:
        return "a few long answers hold up steps; raise grpo.rollout.staleness, or lower maxNewTokens"
    if is_colocated:
        return "engines stand still while ranks learn, for they share their GPUs or cores"
    return "ranks are the slower side; lower grpo.rollout.replicas, or give their GPUs to the ranks"
