"""The manifests of jobs of every sort, as files to be reviewed: `make generate` writes them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from builders import GRPO, SFT, merge_sections
from moejob_api.contract.pods import Environment
from moejob_api.rules.limits import DEFAULT_LIMITS, JobLimits
from moejob_operator.actions import Ensure
from moejob_operator.children.attempt import Images, JobNetwork
from moejob_operator.children.gangs import GangApi
from moejob_operator.cluster import Children
from moejob_operator.decide import plan_reconciliation
from moejob_operator.observed import SpecCache, read_observation
from moejob_operator.planning.observed_state import OperatorSetting
from moejob_operator.validation import validate_spec

FOLDER = Path(__file__).parent / "operator" / "golden"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
IMAGES = Images(
    trainer="registry.example/moejob-trainer:1",
    trainer_colocated="registry.example/moejob-trainer-colocated:1",
    rollout="registry.example/moejob-rollout:1",
)


@dataclass(frozen=True)
class GoldenJob:
    """One job; sections are laid over a small SFT job."""

    name: str
    sections: Mapping[str, Any]
    apis: frozenset[GangApi] = field(default_factory=frozenset)
    limits: JobLimits = DEFAULT_LIMITS


_TINY: Mapping[str, Any] = {
    "model": {"source": "moejob/tiny-moe"},
    "data": {"maxLength": 512},
    "parallelism": {"data": 2},
    "resources": {"accelerator": "CPU", "gpusPerNode": 2, "cpu": "4", "memory": "8Gi", "sharedMemory": "1Gi"},
    "storage": {"size": "10Gi"},
}
# Two nodes whose experts talk across them.
_TWO_NODES: Mapping[str, Any] = {
    "parallelism": {"tensor": 2, "expert": 8},
    "resources": {
        "gpuType": "H100",
        "cpu": "96",
        "memory": "1Ti",
        "topologyKey": "example.com/rack",
        "rdma": {"resource": "rdma/hca", "count": 8, "networks": "rdma-0,rdma-1"},
        "priorityClassName": "training",
        "env": [{"name": "HF_TOKEN", "secret": {"name": "hugging-face", "key": "token"}}],
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "storage": {"size": "4Ti", "storageClass": "shared"},
}
_GRPO: Mapping[str, Any] = {
    "method": "GRPO",
    "model": {"source": "moejob/tiny-moe"},
    "data": {"maxLength": 512},
    "parallelism": {"data": 2},
    "resources": {"gpusPerNode": 2},
    "storage": {"size": "100Gi"},
}
_ROLLOUT: Mapping[str, Any] = {"rewards": [{"name": "math"}], "maxNewTokens": 256, "promptsPerStep": 2}


_SEPARATE: Mapping[str, Any] = {
    **_GRPO,
    "grpo": {**_ROLLOUT, "rollout": {"placement": "Separate", "replicas": 1}},
}


def _build_gang(name: str, api: GangApi, queue: str | None = None) -> GoldenJob:
    lifecycle = {"gang": name} | ({} if queue is None else {"queue": queue})
    return GoldenJob(f"gang-{name.lower()}", {**_TWO_NODES, "lifecycle": lifecycle}, frozenset({api}))


GOLDEN = (
    GoldenJob("sft-cpu-tiny", _TINY),
    GoldenJob("sft-two-nodes-rdma-topology", _TWO_NODES),
    GoldenJob(
        "sft-own-claim",
        merge_sections(_TINY, {"model": {"source": "pvc://models/tiny"}})
        | {"storage": {"size": None, "claimName": "checkpoints", "mountPath": "/checkpoints"}},
    ),
    GoldenJob("grpo-colocated", {**_GRPO, "grpo": _ROLLOUT}),
    GoldenJob("grpo-separate", _SEPARATE),
    GoldenJob(
        "grpo-separate-volcano",
        {**_SEPARATE, "lifecycle": {"gang": "Volcano", "queue": "team"}},
        frozenset({GangApi.VOLCANO}),
    ),
    _build_gang("Native", GangApi.NATIVE),
    _build_gang("Volcano", GangApi.VOLCANO, queue="team"),
    _build_gang("Coscheduling", GangApi.COSCHEDULING),
    _build_gang("Kueue", GangApi.KUEUE, queue="team"),
    # Two groups of two pods.
    GoldenJob(
        "gang-kueue-slices",
        {
            **_TINY,
            "parallelism": {"expert": 4, "data": 2},
            "resources": {"gpusPerNode": 2, "topologyKey": "example.com/rack"},
            "lifecycle": {"queue": "team"},
        },
        frozenset({GangApi.KUEUE}),
    ),
)


def render_manifests(golden: GoldenJob) -> str:
    """All that is created for a job, in the order in which it is."""
    return yaml.safe_dump_all(_manifests(golden), sort_keys=False, width=120)


def _manifests(golden: GoldenJob) -> Iterator[dict[str, Any]]:
    base = GRPO if golden.sections.get("method") == "GRPO" else SFT
    raw = {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "job", "namespace": "team", "uid": "6f1c", "generation": 1},
        "spec": merge_sections(base, golden.sections),
    }
    return (_without_spec(manifest) for manifest in create_manifests(raw, golden.apis, golden.limits))


def create_manifests(
    raw: Mapping[str, Any], apis: frozenset[GangApi], limits: JobLimits = DEFAULT_LIMITS
) -> Iterator[dict[str, Any]]:
    """All that the operator creates when it first sees a job that the API server holds."""
    seen = read_observation(dict(raw), Children((), (), (), ()), SpecCache())
    assert seen.job.spec is not None, seen.job.problems
    validation = validate_spec(seen.job.spec, limits)
    assert validation.is_accepted, validation.problems
    for action in plan_reconciliation(
        seen, validation, OperatorSetting(IMAGES, apis, JobNetwork("moejob-system")), NOW
    ).actions:
        assert isinstance(action, Ensure)
        yield dict(action.manifest)


def _without_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    """The spec in the environment would be most of the file, and changes with every default."""
    for container in manifest.get("spec", {}).get("containers", ()):
        for variable in container["env"]:
            if variable["name"] == Environment.SPEC:
                variable["value"] = "(the spec with all defaults, as JSON)"
    return manifest


def main() -> None:
    """Write every file, and remove those of jobs that are no more."""
    for stale in set(FOLDER.glob("*.yaml")) - {FOLDER / f"{golden.name}.yaml" for golden in GOLDEN}:
        stale.unlink()
    for golden in GOLDEN:
        (FOLDER / f"{golden.name}.yaml").write_text(render_manifests(golden))


if __name__ == "__main__":
    main()
