"""What a pod says in Prometheus' text format: its ranks, its restarts and, on pod 0, the run. Pure.

Written by hand: a dozen gauges are less than a client library, which the trainer would need for nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from moejob_api.contract import PodProgress, RunProgress

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Field of RunProgress, name and meaning of the gauge.
_RUN = (
    ("step", "moejob_step", "Steps done."),
    ("total_steps", "moejob_total_steps", "Steps of the whole run."),
    ("epoch", "moejob_epoch", "Passes over the data done."),
    ("loss", "moejob_loss", "Loss of the last step."),
    ("mtp_loss", "moejob_mtp_loss", "Loss of further tokens in the last step."),
    ("reward", "moejob_reward", "Mean reward of the last step."),
    ("learning_rate", "moejob_learning_rate", "Rate of the last update."),
    ("gradient_norm", "moejob_gradient_norm", "Norm of the gradient before clipping."),
    ("tokens_per_second_per_gpu", "moejob_tokens_per_second_per_gpu", "Speed."),
    ("mfu", "moejob_mfu_ratio", "Share of peak."),
    ("last_checkpoint_step", "moejob_last_checkpoint_step", "Newest complete checkpoint."),
    ("save_seconds", "moejob_save_seconds", "How long the last save took."),
)


def exposition(pod: PodProgress) -> str:
    """The metrics of a pod."""
    lines = [
        *_gauge("moejob_pod_ready", "Every rank of the pod has sent a heartbeat.", [("", int(pod.ready))]),
        *_gauge(
            "moejob_rank_beat_age_seconds",
            "Seconds since the last sign of life.",
            [(f'{{rank="{beat.rank}"}}', round(beat.age_seconds, 3)) for beat in pod.ranks],
        ),
        *_gauge(
            "moejob_rank_step", "Steps a rank has done.", [(f'{{rank="{beat.rank}"}}', beat.step) for beat in pod.ranks]
        ),
        "# HELP moejob_rank_restarts_total Restarts of ranks in place that this pod was the reason for.",
        "# TYPE moejob_rank_restarts_total counter",
        f"moejob_rank_restarts_total {pod.restarts}",
        *(() if pod.run is None else _run(pod.run)),
    ]
    return "\n".join(lines) + "\n"


def _run(run: RunProgress) -> Iterable[str]:
    for field, name, meaning in _RUN:
        value = getattr(run, field)
        if value is not None:
            yield from _gauge(name, meaning, [("", value)])


def _gauge(name: str, meaning: str, samples: Iterable[tuple[str, float]]) -> Iterable[str]:
    rows = [f"{name}{labels} {value}" for labels, value in samples]
    return [f"# HELP {name} {meaning}", f"# TYPE {name} gauge", *rows] if rows else []
