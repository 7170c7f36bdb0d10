"""Names of what evaluations measure, and their order: which of two numbers is the better one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from moejob_api.job import Spec
from moejob_api.job.model import DataFormat, Dataset

LOSS, MEAN, PASS = "evalLoss", "evalMean", "evalPass"


def needs_evaluation(spec: Spec, step: int, total_steps: int) -> bool:
    """Return whether the run evaluates after a step."""
    every = spec.training.eval_every
    return bool(spec.data.eval) and (step == total_steps or (every is not None and step % every == 0))


def evaluation_measures(spec: Spec) -> tuple[str, ...]:
    """Numbers of the step log by which evaluations of this job can be compared, the usual one first."""
    if not spec.data.eval:
        return ()
    if spec.grpo is not None:
        return tuple(f"{name}@{spec.grpo.evaluation.samples}" for name in (MEAN, PASS))
    names, has_prompts = set_names(loss_sets(spec)), bool(prompt_sets(spec))
    # With one set its loss is evalLoss itself.
    losses = (LOSS, *(f"{LOSS}/{name}" for name in names if len(names) > 1)) if names else ()
    return (*losses, *([f"{MEAN}@1"] if has_prompts else []))


def loss_sets(spec: Spec) -> tuple[Dataset, ...]:
    """The evaluation data of an SFT job whose answers are known, for their loss."""
    return tuple(dataset for dataset in spec.data.eval if dataset.format is not DataFormat.PROMPTS)


def prompt_sets(spec: Spec) -> tuple[Dataset, ...]:
    """The evaluation data that is answered."""
    return tuple(dataset for dataset in spec.data.eval if dataset.format is DataFormat.PROMPTS)


def comparison_measure(spec: Spec) -> str | None:
    """The number by which evaluations of this job are compared; None where nothing is evaluated."""
    measure_names = evaluation_measures(spec)
    return (spec.training.best_by or measure_names[0]) if measure_names else None


def is_lower_better(measure: str) -> bool:
    """Return whether less is better."""
    return measure.startswith(LOSS)


def is_better(measure: str, value: float, than: float, least: float = 0.0) -> bool:
    """Return whether one value of a measure is better than another, and by no less than `least`."""
    gain = than - value if is_lower_better(measure) else value - than
    return gain > 0 and gain >= least


def set_names(datasets: Sequence[Dataset]) -> tuple[str, ...]:
    """Name data sets by their files or repositories, with the split where it is not train, numbered where they repeat.

    /data/held-out.jsonl and org/chats[test] are held-out and chats-test.
    """
    plain_names = [_plain_name(dataset) for dataset in datasets]
    counts = Counter[str]()
    names = []
    for name in plain_names:
        counts[name] += 1
        names.append(f"{name}-{counts[name]}" if plain_names.count(name) > 1 else name)
    return tuple(names)


def _plain_name(dataset: Dataset) -> str:
    # held-out.jsonl.gz has two suffixes.
    stem = PurePosixPath(dataset.source).name.partition(".")[0] or "data"
    return stem if dataset.split == "train" else f"{stem}-{dataset.split}"
