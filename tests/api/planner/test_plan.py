"""The plan of a job as a whole: what it refuses and why, and that its advice can be followed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import dense_model, latent_model, moe_model, spec
from moejob_api.job import Spec
from moejob_api.models.shape import ModelShape
from moejob_api.planner.plan import Plan, plan_job
from moejob_api.problems import Rule

MODELS: dict[str, ModelShape | None] = {
    "dense": dense_model(layers=8, heads=16, key_value_heads=4, intermediate=4096),
    "mixture": moe_model(layers=12, experts=16),
    "latent": latent_model(layers=13),
    "unseen": None,
}
SMALL = st.sampled_from((1, 2, 3, 4, 8))


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Jobs around the edge of what is accepted: sizes, batches, memory settings and methods drawn freely."""
    parallelism: dict[str, Any] = {
        "tensor": draw(SMALL),
        "pipeline": draw(SMALL),
        "expert": draw(SMALL),
        "context": draw(st.sampled_from((1, 2))),
        "data": draw(SMALL),
        "expertLayout": draw(st.sampled_from(("Product", "Folded"))),
        "virtualPipeline": draw(st.sampled_from((None, 2, 3))),
        "firstStageLayers": draw(st.sampled_from((None, 1, 3))),
        "embeddingCountsAsLayer": draw(st.booleans()),
    }
    sections: dict[str, Any] = {
        "method": draw(st.sampled_from(("SFT", "GRPO"))),
        "parallelism": parallelism,
        "training": {
            "globalBatchSize": draw(st.sampled_from((8, 24, 64, 256))),
            "microBatchSize": draw(st.sampled_from((1, 2))),
            "recompute": {"granularity": draw(st.sampled_from(("None", "Selective", "Full")))},
            "lora": draw(st.sampled_from((None, {"rank": 8}))),
        },
        "memory": {"offloadOptimizer": draw(st.sampled_from((0.0, 1.0)))},
        "resources": {
            "gpusPerNode": draw(st.sampled_from((4, 8))),
            "gpuMemoryGiB": draw(st.sampled_from((None, 16, 80))),
        },
    }
    return spec(**sections)


@settings(max_examples=150, deadline=None)
@given(specs(), st.sampled_from(sorted(MODELS)))
def test_any_job_gets_a_plan_whose_advice_is_sound(asked: Spec, name: str) -> None:
    shape = MODELS[name]
    result = plan_job(asked, shape)
    if result.is_accepted:
        assert both_grids_are_exact(result)
        assert result.suggestions == ()
    for suggestion in result.suggestions:
        followed = plan_job(asked.model_copy(update={"parallelism": suggestion.parallelism}), shape)
        assert followed.is_accepted, followed.problems
        assert followed.layout is not None
        assert followed.layout.gpus == suggestion.fit.gpus


def both_grids_are_exact(result: Plan) -> bool:
    sizes = result.layout
    assert sizes is not None
    dense = sizes.tensor * sizes.context * sizes.data * sizes.pipeline
    experts = sizes.expert_tensor * sizes.expert * sizes.expert_data * sizes.pipeline
    return dense == experts == sizes.gpus


def test_suggestions_stay_on_the_same_gpus_first() -> None:
    folded = {"expertLayout": "Folded", "pipeline": 16, "data": 4, "expert": 32}
    result = plan_job(spec(parallelism=folded, storage={"size": "40Ti"}), latent_model())
    assert [found.fit.gpus for found in result.suggestions[:3]] == [64, 64, 64]
    distances = [found.distance for found in result.suggestions[:3]]
    assert distances == sorted(distances)


def test_a_job_for_fewer_gpus_than_there_are_gets_layouts_for_those_there_are() -> None:
    result = plan_job(spec(parallelism={"expert": 8}), moe_model(), available_gpus=16)
    assert [problem.rule for problem in result.problems] == [Rule.GPU_COUNT]
    assert result.suggestions[0].fit.gpus == 16
    # What was asked for is still shown: the difference is what the reader wants to see.
    assert result.layout is not None
    assert result.memory is not None


def test_what_no_layout_can_mend_gets_no_layouts() -> None:
    result = plan_job(spec(parallelism={"expert": 8}, storage={"size": None}), moe_model())
    assert [problem.rule for problem in result.problems] == [Rule.EXACTLY_ONE]
    assert result.suggestions == ()


def test_absurd_sizes_are_refused_at_once() -> None:
    huge = dict.fromkeys(("tensor", "pipeline", "expert", "context", "data"), 65_536)
    result = plan_job(spec(parallelism=huge), moe_model())
    assert Rule.GPU_COUNT in [problem.rule for problem in result.problems]
    assert result.layout is None


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        pytest.param({"gpuType": "A100"}, "A100 has 79.1 GiB", id="by type"),
        pytest.param({"gpuMemoryGiB": 40}, "gpuMemoryGiB says 40.0 GiB", id="by size"),
    ],
)
def test_a_job_that_does_not_fit_is_told_what_would_make_it_fit(resources: dict[str, Any], says: str) -> None:
    result = plan_job(spec(parallelism={"expert": 8}, resources=resources), moe_model())
    (problem,) = result.problems
    assert problem.rule is Rule.MEMORY
    assert says in problem.message
    assert "it would fit with" in problem.message


def test_without_a_gpu_type_nothing_is_refused_for_memory() -> None:
    result = plan_job(spec(parallelism={"expert": 1}), moe_model())
    assert result.is_accepted
    assert result.memory is not None
    assert Rule.MEMORY in [warning.rule for warning in result.warnings]


def test_host_memory_that_would_kill_the_pod_is_refused() -> None:
    asked = spec(parallelism={"expert": 8}, memory={"offloadOptimizer": 1.0}, resources={"memory": "64Gi"})
    (problem,) = plan_job(asked, moe_model()).problems
    assert problem.path == "spec.resources.memory"


@pytest.mark.parametrize(
    ("replay", "problems"),
    [
        pytest.param(False, [], id="without replay"),
        pytest.param(True, ["spec.resources.memory"], id="with replay"),
    ],
)
def test_host_memory_without_room_for_replayed_routing_is_refused(replay: bool, problems: list[str]) -> None:
    grpo = {"groupSize": 16, "promptsPerStep": 512, "routingReplay": replay}
    resources = {"memory": "440Gi", "gpuType": "H200"}
    sections = {"training": {"globalBatchSize": None}, "data": {"maxLength": 8192}, "grpo": grpo}
    result = plan_job(
        spec(method="GRPO", parallelism={"expert": 8, "data": 2}, resources=resources, **sections), moe_model()
    )
    assert [problem.path for problem in result.problems] == problems
    # 512 x 16 answers of 8,192 tokens, 48 layers of 8 choices of a byte: 24 GiB; 5 times in the first rank, twice in 7.
    said = "".join(problem.message for problem in result.problems)
    assert ("and 226.5 GiB for grpo.routingReplay included" in said) == replay
    assert said.endswith("or grpo.routingReplay to false") == replay


def test_a_volume_too_small_for_its_checkpoints_is_refused() -> None:
    (problem,) = plan_job(spec(parallelism={"expert": 8}, storage={"size": "500Gi"}), moe_model()).problems
    # 30.5 B parameters of 14 bytes, three times, and 2 bytes each for an export and for the downloaded model.
    assert problem.rule is Rule.STORAGE
    assert "set size to 1309Gi" in problem.message


def test_a_volume_without_room_for_recorded_tokens_is_refused() -> None:
    grpo = {"promptsPerStep": 64, "groupSize": 16, "maxNewTokens": 8192, "recordTokens": True}
    sections = {"training": {"globalBatchSize": None}, "data": {"maxLength": 10_000}, "storage": {"size": "1310Gi"}}
    resources = {"gpuType": "H200"}

    def refusals(is_recorded: bool) -> list[str]:
        job = spec(
            method="GRPO",
            parallelism={"expert": 8},
            resources=resources,
            grpo=grpo | {"recordTokens": is_recorded},
            **sections,
        )
        return [problem.message for problem in plan_job(job, moe_model()).problems if problem.rule is Rule.STORAGE]

    assert refusals(is_recorded=False) == []
    (message,) = refusals(is_recorded=True)
    assert "grpo.recordTokens (19." in message
    assert message.endswith("or grpo.recordTokens to false")


def test_a_mostly_idle_pipeline_is_worth_a_word() -> None:
    result = plan_job(spec(parallelism={"pipeline": 8}, training={"globalBatchSize": 4}), moe_model())
    assert "idle for 64% of a step" in " ".join(warning.message for warning in result.warnings)


def test_microbatches_that_leave_a_gpu_waiting_are_worth_a_word() -> None:
    def warned(**changes: Any) -> bool:
        base: dict[str, Any] = {"globalBatchSize": 16, "microBatchSize": 2}
        result = plan_job(spec(data={"maxLength": 256}, **({"training": base} | changes)), moe_model())
        return "waiting for its host" in " ".join(warning.message for warning in result.warnings)

    assert warned()
    assert not warned(training={"globalBatchSize": 16, "dynamicBatchTokens": 4096})
    assert not warned(training={"globalBatchSize": 16, "microBatchSize": 8})
    # One microbatch cannot be larger, and a CPU waits for no host.
    assert not warned(training={"globalBatchSize": 2, "microBatchSize": 2})
    assert not warned(resources={"accelerator": "CPU"})
