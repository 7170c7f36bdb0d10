"""A field that does nothing beside the others of its job is named in a warning; one that acts is not."""

from __future__ import annotations

from typing import Any

import pytest

from builders import dense_model, moe_model, spec
from moejob_api.models.shape import ModelShape
from moejob_api.planner.plan import plan_job
from moejob_api.problems import Rule
from moejob_api.rules.idle_fields import idle_fields

TEXT = {"source": "a", "format": "Text"}
CLAIM = {"size": None, "claimName": "a"}


def grpo(**settings: Any) -> dict[str, Any]:
    return {"method": "GRPO", "grpo": settings}


def communication(**settings: Any) -> dict[str, Any]:
    return {"training": {"communication": settings}}


@pytest.mark.parametrize(
    ("model", "sections", "path", "says"),
    [
        (dense_model(), {"moe": {"zLossCoefficient": 0.1}}, "moe.zLossCoefficient", "has no experts"),
        (
            moe_model(),
            {"moe": {"balancing": "None", "auxLossCoefficient": 0.1}},
            "moe.auxLossCoefficient",
            "no such loss",
        ),
        (
            moe_model(),
            {"moe": {"balancing": "AuxLoss", "seqAuxLossCoefficient": 0.1}},
            "moe.seqAuxLossCoefficient",
            "auxLossCoefficient is its weight",
        ),
        (moe_model(), {"moe": {"expertBiasUpdateRate": 0.1}}, "moe.expertBiasUpdateRate", "AuxLoss moves no bias"),
        (
            moe_model(),
            {"training": {"scheduler": {"kind": "Constant", "minimumLearningRate": 1e-6}}},
            "training.scheduler.minimumLearningRate",
            "Constant does not decay",
        ),
        (
            moe_model(),
            {"training": {"maxSteps": 10, "scheduler": {"warmupSteps": 2, "decaySteps": 9}}},
            "training.scheduler.decaySteps",
            "lower it to 8",
        ),
        (moe_model(), {"training": {"mtpLossCoefficient": 0.5}}, "training.mtpLossCoefficient", "no MTP modules"),
        (
            moe_model(),
            {"data": {"train": [TEXT | {"source": "/a.jsonl", "streaming": True}]}},
            "data.train[0].streaming",
            "read record by record anyway",
        ),
        (moe_model(), {"data": {"eval": [{**TEXT, "weight": 2.0}]}}, "data.eval[0].weight", "counts once"),
        (moe_model(), {"data": {"train": [TEXT], "chatTemplate": "{{ 1 }}"}}, "data.chatTemplate", "format Chat"),
        (
            moe_model(),
            {"data": {"train": [{**TEXT, "trainedTurns": "Last"}]}},
            "data.train[0].trainedTurns",
            "records of format Text have no turns",
        ),
        (
            moe_model(),
            {"data": {"eval": [TEXT]}, "checkpoint": {"keepBest": 1}},
            "checkpoint.keepBest",
            "the last step alone is evaluated",
        ),
        (
            moe_model(),
            {"data": {"eval": [TEXT]}, "training": {"evalEvery": 25, "earlyStop": {"patience": 3}}},
            "training.earlyStop",
            "at step 100 at the earliest, and it has 100 steps",
        ),
        (
            moe_model(),
            {"data": {"eval": [TEXT]}, "training": {"evalAnswers": {"prompts": 4}}},
            "training.evalAnswers.prompts",
            "no set of data.eval has format Prompts",
        ),
        (moe_model(), {"model": {"source": "/models/a", "revision": "main"}}, "model.revision", "is a folder"),
        (
            moe_model(),
            {"model": {"source": "Qwen/Qwen3-8B", "config": "/models/a", "revision": "main"}},
            "model.revision",
            "/models/a is a folder",
        ),
        (
            moe_model(),
            {"data": {"train": [{**TEXT, "source": "/a", "configuration": "b"}]}},
            "data.train[0].configuration",
            "no configurations",
        ),
        (
            moe_model(),
            {"data": {"train": [{**TEXT, "source": "/a", "split": "b"}]}},
            "data.train[0].split",
            "no splits",
        ),
        (moe_model(), {"storage": {**CLAIM, "storageClass": "a"}}, "storage.storageClass", "exists already"),
        (moe_model(), {"storage": {**CLAIM, "accessModes": ["ReadWriteOnce"]}}, "storage.accessModes", "claim a"),
        (moe_model(), {"resources": {"accelerator": "CPU", "gpuResource": "a"}}, "resources.gpuResource", "no GPUs"),
        (moe_model(), {"parallelism": {"sequence": True}}, "parallelism.sequence", "tensor 1"),
        (
            moe_model(),
            communication(overlapGradientReduction=False) | {"memory": {"sharding": "FSDP"}},
            "training.communication.overlapGradientReduction",
            "FSDP gathers weights and sums gradients",
        ),
        (
            moe_model(),
            communication(overlapParameterGather=True) | {"memory": {"sharding": "ZeRO2"}},
            "training.communication.overlapParameterGather",
            "ZeRO2 gathers weights",
        ),
        (
            moe_model(),
            communication(overlapParameterGather=True, overlapGradientReduction=False),
            "training.communication.overlapParameterGather",
            "in one bucket",
        ),
        (
            moe_model(),
            grpo() | communication(overlapParameterGather=True),
            "training.communication.overlapParameterGather",
            "GRPO publishes",
        ),
        (
            moe_model(),
            communication(readReplicas=True),
            "training.communication.readReplicas",
            "with DistributedOptimizer every replica has all weights",
        ),
        (
            moe_model(),
            grpo() | communication(readReplicas=True) | {"memory": {"sharding": "FSDP", "offloadParameters": True}},
            "training.communication.readReplicas",
            "offloadParameters moves shares",
        ),
        (
            moe_model(),
            communication(overlapOptimizerCopies=True),
            "training.communication.overlapOptimizerCopies",
            "offloadOptimizer is 0",
        ),
        (
            moe_model(),
            {"parallelism": {"lossCountsAsLayer": True}},
            "parallelism.lossCountsAsLayer",
            "pipeline 1 has one stage",
        ),
        (None, {"training": {"mtpLossCoefficient": 0.5, "lora": {}}}, "training.mtpLossCoefficient", "LoRA"),
        (moe_model(), grpo(kl={"kind": "K1"}), "grpo.kl.kind", "coefficient 0"),
        (moe_model(), grpo(kl={"applyTo": "Reward"}), "grpo.kl.applyTo", "coefficient 0"),
        (moe_model(), grpo(policyLoss="CISPO", dualClip=3.0), "grpo.dualClip", "CISPO"),
        (moe_model(), grpo(overlong={"penaltyTokens": 9}), "grpo.overlong.penaltyTokens", "penalty is 0"),
        (moe_model(), grpo(evaluation={"samples": 4}), "grpo.evaluation.samples", "no data.eval"),
        (
            moe_model(),
            grpo(rewards=[{"name": "math", "retries": 9}]),
            "grpo.rewards[0].retries",
            "only rewards of url",
        ),
        (
            moe_model(),
            grpo(rewards=[{"name": "math", "batchSize": 9}]),
            "grpo.rewards[0].batchSize",
            "only rewards of module and url",
        ),
        (
            moe_model(),
            grpo(rewards=[{"name": "math", "modulePath": "/a"}]),
            "grpo.rewards[0].modulePath",
            "only rewards of module",
        ),
        (
            moe_model(),
            grpo(rewards=[{"url": "http://a", "conversational": True}]),
            "grpo.rewards[0].conversational",
            "only rewards of module",
        ),
        (
            moe_model(),
            grpo(rewards=[{"name": "math", "headersFrom": [{"header": "A", "variable": "PATH"}]}])
            | {"resources": {"env": [{"name": "PATH", "value": "/"}]}},
            "grpo.rewards[0].headersFrom",
            "only rewards of url",
        ),
        (
            moe_model(),
            grpo(rewards=[{"module": "a:b", "unavailableTimeoutSeconds": 9}]),
            "grpo.rewards[0].unavailableTimeoutSeconds",
            "only rewards of url",
        ),
        (
            moe_model(),
            grpo(rewards=[{"name": "numeric", "startTimeoutSeconds": 9}]),
            "grpo.rewards[0].startTimeoutSeconds",
            "only rewards of module, math and format",
        ),
        (
            moe_model(),
            grpo(rewards=[{"name": "length", "concurrency": 9}]),
            "grpo.rewards[0].concurrency",
            "only rewards of module, url, math and format",
        ),
        (
            moe_model(),
            grpo(rollout={"gpuMemoryUtilization": 0.5}) | {"resources": {"accelerator": "CPU"}},
            "grpo.rollout.gpuMemoryUtilization",
            "no GPU memory",
        ),
        (moe_model(), {"resources": {"rolloutImage": "a"}}, "resources.rolloutImage", "generates no answers"),
    ],
)
def test_a_field_that_does_nothing_is_named_in_a_warning(
    model: ModelShape | None, sections: dict[str, Any], path: str, says: str
) -> None:
    (warning,) = (one for one in plan_job(spec(**sections), model).warnings if one.rule is Rule.IDLE)
    assert warning.path == f"spec.{path}"
    assert says in warning.message


@pytest.mark.parametrize("model", [dense_model(), moe_model(), None])
def test_a_job_of_defaults_has_no_field_that_does_nothing(model: ModelShape | None) -> None:
    assert not [*idle_fields(spec(), model)]
