"""Metrics of a pod in Prometheus' text format: its ranks, its restarts and, on pod 0, the run. Pure.

Written by hand: a dozen gauges are less than a client library, which the trainer would need for nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby

from moejob_api.contract.pods import PodProgress, RunProgress, parse_phase

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


# Names in the step log: `syncSeconds`, `reward/exact-match`, `evalPass@4`.
_MEASURE = re.compile(r"(?P<base>[A-Za-z]+)(?:/(?P<name>.+)|@(?P<k>\d+))?")


def format_metrics(pod: PodProgress) -> str:
    """The metrics of a pod."""
    phase = None if pod.phase is None else parse_phase(pod.phase)
    lines = [
        *_gauge_lines("moejob_pod_ready", "Every rank of the pod has sent a heartbeat.", [("", int(pod.ready))]),
        *_gauge_lines(
            "moejob_rank_beat_age_seconds",
            "Seconds since the last sign of life.",
            [(f'{{rank="{beat.rank}"}}', round(beat.age_seconds, 3)) for beat in pod.ranks],
        ),
        *_gauge_lines(
            "moejob_rank_step", "Steps a rank has done.", [(f'{{rank="{beat.rank}"}}', beat.step) for beat in pod.ranks]
        ),
        *_gauge_lines(
            "moejob_phase_seconds",
            "How long the rank that is furthest behind has been in its phase.",
            [] if phase is None else [(f'{{phase="{phase[0]}"}}', round(pod.phase_seconds or 0.0, 3))],
        ),
        *_gauge_lines(
            "moejob_phase_ratio",
            "Share of the phase's work that is done.",
            [] if phase is None or phase[1] is None else [(f'{{phase="{phase[0]}"}}', phase[1] / 100)],
        ),
        "# HELP moejob_rank_restarts_total Restarts of ranks in place that this pod was the reason for.",
        "# TYPE moejob_rank_restarts_total counter",
        f"moejob_rank_restarts_total {pod.restarts}",
        *(() if pod.run is None else _run_gauges(pod.run)),
    ]
    return "\n".join(lines) + "\n"


def _run_gauges(run: RunProgress) -> Iterable[str]:
    for field, name, meaning in _RUN:
        value = getattr(run, field)
        if value is not None:
            yield from _gauge_lines(name, meaning, [("", value)])
    yield from _measure_gauges(run.measures)


def _measure_gauges(measures: Mapping[str, float]) -> Iterable[str]:
    """Every other number of the step log, by its name there: `reward/math` is moejob_reward_by_name{name="math"}."""
    samples = sorted(sample for name, value in measures.items() for sample in _measure_samples(name, value))
    for (gauge, base), rows in groupby(samples, key=lambda sample: sample[:2]):
        yield from _gauge_lines(gauge, f"{base} in steps.jsonl.", [(labels, value) for *_, labels, value in rows])


def _measure_samples(name: str, value: float) -> Iterable[tuple[str, str, str, float]]:
    """Gauge, name in the log, labels and value of a measure; none of a name that is not one."""
    match = _MEASURE.fullmatch(name)
    if match is None:
        return
    base = match["base"]
    # Seconds of the step, where all others say of what.
    words = "stepSeconds" if base == "seconds" else base
    gauge = f"moejob_{re.sub(r'(?<=[a-z])(?=[A-Z])', '_', words).lower()}"
    if match["name"] is not None:
        yield f"{gauge}_by_name", base, f'{{name="{_escape_label(match["name"])}"}}', value
    elif match["k"] is not None:
        yield gauge, base, f'{{k="{match["k"]}"}}', value
    else:
        yield gauge, base, "", value


def _escape_label(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _gauge_lines(name: str, meaning: str, samples: Iterable[tuple[str, float]]) -> Iterable[str]:
    rows = [f"{name}{labels} {value}" for labels, value in samples]
    return [f"# HELP {name} {meaning}", f"# TYPE {name} gauge", *rows] if rows else []
