"""Admission reviews that take long: drawn sizes and models, then the worst of them made worse by hill climbing.

What is climbed is the CPU time of one thread, which other work on the machine changes least; what is recorded is how
long the answers then take by a clock.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from moejob_operator.admission.review import review_job

# Numbers with more divisors than any before them, beside ordinary ones.
_SIZES = (1, 2, 3, 4, 7, 8, 12, 24, 48, 60, 120, 128, 240, 256, 360, 512, 720, 840, 1260, 1680, 2520, 5040, 10_080)
_BATCHES = (1, 7, 64, 720, 5040, 27_720, 55_440, 360_360, 720_720)
_MODELS = (
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V2-Lite",
    "meta-llama/Llama-3.1-405B",
    "mistralai/Mixtral-8x22B-v0.1",
    "openai/gpt-oss-120b",
    "zai-org/GLM-4.5",
    "pvc://models/unseen",
)

# Where a value stands in a spec, and those that it may have; None leaves it out.
Place = tuple[str, ...]
GENES: Mapping[Place, Sequence[object]] = {
    ("method",): ("SFT", "GRPO"),
    ("model", "source"): _MODELS,
    ("parallelism", "tensor"): _SIZES[:14],
    ("parallelism", "pipeline"): _SIZES,
    ("parallelism", "expert"): _SIZES,
    ("parallelism", "context"): _SIZES,
    ("parallelism", "data"): _SIZES,
    ("parallelism", "expertTensor"): (None, 1, 2, 4, 12),
    ("parallelism", "virtualPipeline"): (None, 2, 3, 4, 7, 12),
    ("parallelism", "expertLayout"): ("Product", "Folded"),
    ("parallelism", "firstStageLayers"): (None, 1, 3),
    ("training", "globalBatchSize"): _BATCHES,
    ("training", "microBatchSize"): (None, 1, 2, 12, 60),
    ("data", "maxLength"): (None, 512, 5040, 131_072),
    ("resources", "gpusPerNode"): _SIZES[:18],
    ("resources", "gpuMemoryGiB"): (None, 1, 8, 24, 80, 141),
    ("resources", "memory"): (None, "1Gi", "4Ti"),
    ("training", "recompute", "granularity"): (None, "Full", "Selective"),
    ("training", "lora", "rank"): (None, 16),
    ("memory", "offloadOptimizer"): (None, True),
    ("memory", "sharding"): (None, "ZeRO1", "ZeRO2", "FSDP"),
    ("grpo", "rollout", "placement"): (None, "Separate", "Colocated"),
    ("grpo", "rollout", "tensor"): (None, 1, 2, 8),
}
Drawn = dict[Place, object]


@dataclass(frozen=True, slots=True)
class HostileReview:
    """A review and the CPU time that it took while it was searched for."""

    genes: Drawn
    seconds: float


def worst_reviews(draw: random.Random, drawn: int, climbs: int, steps: int) -> list[HostileReview]:
    """Draw reviews, then change the worst of them step by step; all that were tried, the worst first."""
    tried = [_measure_review({place: draw.choice(values) for place, values in GENES.items()}) for _ in range(drawn)]
    best = sorted(tried, key=lambda one: -one.seconds)[:climbs]
    for start in best:
        found = start
        for _ in range(steps):
            other = _measure_review(_change_genes(found.genes, draw))
            tried.append(other)
            # What takes as long is taken too: from a plateau there may be a way up.
            found = max(other, found, key=lambda one: one.seconds)
    return sorted(tried, key=lambda one: -one.seconds)


def request(genes: Drawn, number: int = 0) -> dict[str, Any]:
    """Return the review of a job with these values: one of an update, for which old and new are both validated.

    The old one has no sizes: what is wrong with both is let pass, and no layouts are looked for.
    """
    old = {place: value for place, value in genes.items() if place[0] != "parallelism"}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": str(number),
            "operation": "UPDATE",
            "resource": {"group": "moejob.dev", "version": "v1alpha1", "resource": "moetrainingjobs"},
            "userInfo": {"username": "a stranger"},
            "object": job(genes),
            "oldObject": job(old),
        },
    }


def job(genes: Drawn) -> dict[str, Any]:
    """Return a job with these values."""
    spec: dict[str, Any] = {
        "data": {"train": [{"source": "/data/train.jsonl", "format": "Chat"}]},
        "training": {"maxSteps": 100},
        "storage": {"size": "4Ti"},
    }
    for place, value in genes.items():
        if value is not None and (place[0] != "grpo" or genes[("method",)] == "GRPO"):
            _put(spec, place, value)
    if genes[("method",)] == "GRPO":
        spec["data"]["train"][0]["format"] = "Prompts"
        spec.setdefault("grpo", {})["rewards"] = [{"name": "math"}]
    metadata = {"name": "job", "namespace": "team"}
    return {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": metadata, "spec": spec}


def answer(review: Mapping[str, Any]) -> bool:
    """Answer a review as the webhook does, without its transport; whether the job is allowed."""
    asked = review["request"]
    return not review_job(asked["operation"], asked["oldObject"], asked["object"]).problems


def seconds_of(review: Mapping[str, Any]) -> float:
    """Seconds of one answer by a clock."""
    started = time.perf_counter()
    answer(review)
    return time.perf_counter() - started


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _measure_review(genes: Drawn) -> HostileReview:
    review = request(genes)
    # The lesser of two: other work on the machine only adds.
    return HostileReview(genes, min(_thread_seconds(review) for _ in range(2)))


def _thread_seconds(review: Mapping[str, Any]) -> float:
    started = time.thread_time()
    answer(review)
    return time.thread_time() - started


def _change_genes(genes: Drawn, draw: random.Random) -> Drawn:
    places = list(islice(iter(draw.sample(list(GENES), 3)), draw.choice((1, 1, 2, 3))))
    return genes | {place: draw.choice(GENES[place]) for place in places}


def _put(tree: dict[str, Any], place: Place, value: object) -> None:
    for step in place[:-1]:
        tree = tree.setdefault(step, {})
    tree[place[-1]] = value
