"""The search for the best layout: exact in spite of all it skips, and its answers can be used as they are."""

from __future__ import annotations

from typing import Any

import pytest

from builders import dense_model, latent_model, moe_model, spec
from moejob_api.derived import rollout_layout
from moejob_api.hardware import H100, H200
from moejob_api.job import Spec
from moejob_api.job.grpo import Grpo, RolloutPlacement
from moejob_api.job.training import Recompute, RecomputeGranularity
from moejob_api.layout.sizes import count_gpus, derive_layout
from moejob_api.models.shape import ModelShape
from moejob_api.planner.cost import step_cost
from moejob_api.planner.engine_choice import find_engine_problem, with_runnable_engines
from moejob_api.planner.memory import estimate_memory
from moejob_api.planner.plan import plan_job
from moejob_api.planner.search import (
    HEADROOM,
    MICRO_BATCH_SIZES,
    LayoutChoice,
    best_layouts,
    candidate_layouts,
    find_constant_problems,
)
from moejob_api.rules import layout_problems

QUESTIONS: list[Any] = [
    pytest.param(moe_model(layers=8, experts=16), {}, 8, id="experts"),
    pytest.param(dense_model(layers=6, heads=16, key_value_heads=2, intermediate=4096), {}, 8, id="dense"),
    pytest.param(moe_model(layers=7, experts=8), {"training": {"lora": {"rank": 8}}}, 4, id="adapters, odd layers"),
]


@pytest.mark.parametrize(("shape", "sections", "count"), QUESTIONS)
def test_the_best_is_the_best_of_all(shape: ModelShape, sections: dict[str, Any], count: int) -> None:
    asked = spec(**sections, resources={"gpuMemoryGiB": 24})
    best = best_layouts(asked, shape, count, H100)[0]
    assert best.cost.seconds == pytest.approx(min(exhaustive(asked, shape, count)))


def exhaustive(asked: Spec, shape: ModelShape, count: int) -> list[float]:
    """The cost of every layout, microbatch and recomputation that keeps the rules and fits, with nothing skipped."""
    limit = int(24 * 2**30 * (1 - HEADROOM))
    found = []
    for cuts in candidate_layouts(asked, shape, count):
        for parallelism in cuts:
            for micro in MICRO_BATCH_SIZES:
                for granularity in RecomputeGranularity:
                    recompute = Recompute(granularity=granularity)
                    training = asked.training.model_copy(update={"micro_batch_size": micro, "recompute": recompute})
                    job = asked.model_copy(update={"parallelism": parallelism, "training": training})
                    sizes = derive_layout(parallelism, 8)
                    if not layout_problems(job, shape) and estimate_memory(job, shape, sizes).is_within(limit):
                        found.append(step_cost(job, shape, sizes, H100).seconds)
    return found


@pytest.mark.parametrize(
    ("shape", "sections", "count"),
    [
        pytest.param(moe_model(), {"resources": {"gpuType": "H100"}}, 16, id="Qwen3-30B"),
        pytest.param(
            latent_model(),
            {"resources": {"gpuType": "H100"}, "training": {"globalBatchSize": 4096}},
            1024,
            id="DeepSeek-V3",
        ),
        pytest.param(dense_model(), {"resources": {"gpuType": "H100"}}, 16, id="offloaded as a last resort"),
        pytest.param(moe_model(), {"method": "GRPO", "resources": {"gpuType": "H200"}}, 8, id="GRPO"),
        pytest.param(moe_model(24), {"method": "GRPO", "resources": {"gpuMemoryGiB": 48}}, 8, id="larger engines"),
    ],
)
def test_every_choice_is_accepted_as_it_stands(shape: ModelShape, sections: dict[str, Any], count: int) -> None:
    asked = spec(**sections, storage={"claimName": "mine", "size": None})
    choices = best_layouts(asked, shape, count, H200 if "H200" in str(sections) else H100)
    assert choices
    weighed = [weighed_seconds(choice) for choice in choices]
    assert weighed == sorted(weighed)
    for choice in choices:
        engines = rollout_layout(choice.spec, choice.layout)
        assert count_gpus(choice.spec.parallelism) + (0 if engines is None else engines.gpus) == count
        assert plan_job(choice.spec, shape, choice.layout.gpus).is_accepted
        assert choice.reasons


def test_layouts_are_enumerated_once() -> None:
    seen = [cut for cuts in candidate_layouts(spec(), moe_model(), 16) for cut in cuts]
    assert len(seen) == len(set(seen))
    for parallelism in seen:
        assert count_gpus(parallelism) == 16


def test_too_few_gpus_have_no_layout() -> None:
    assert best_layouts(spec(resources={"gpuType": "A100"}), latent_model(), 8, H100) == ()


def test_gpus_that_do_not_fill_nodes_have_no_layout() -> None:
    assert best_layouts(spec(), moe_model(), 12, H100) == ()


@pytest.mark.parametrize(
    ("sections", "count", "tensors"),
    [
        pytest.param({"gpuType": "H200"}, 16, [1, 2, 4, 8], id="one GPU holds the model"),
        pytest.param({"gpuType": "H100"}, 16, [2, 4, 8], id="two GPUs hold the model"),
        pytest.param({"gpuMemoryGiB": 40}, 16, [4, 8], id="four GPUs hold the model"),
        pytest.param({"gpuMemoryGiB": 4}, 16, [1], id="no node holds the model"),
        pytest.param({"gpuType": "H100", "gpusPerNode": 1}, 4, [1], id="engines stay in a node"),
        pytest.param({}, 16, [1, 2, 4, 8], id="nothing is known of the GPUs"),
    ],
)
def test_engines_of_each_size_that_holds_the_model_are_tried(
    sections: dict[str, Any], count: int, tensors: list[int]
) -> None:
    assert engine_sizes(spec(method="GRPO", resources=sections), count) == tensors


def test_engines_that_hold_the_model_stay_as_the_job_has_them() -> None:
    asked = spec(method="GRPO", resources={"gpuType": "H200"}, grpo={"rollout": {"tensor": 4}})
    assert engine_sizes(asked, 16) == [4]


@pytest.mark.parametrize(("gibibytes", "tensors"), [(20, [2]), (14, [1])])
def test_engines_divide_the_model(gibibytes: int, tensors: list[int]) -> None:
    """Four GPUs of 14 GiB would hold it, and do not divide its six heads."""
    shape = dense_model(layers=60, heads=6, key_value_heads=2, intermediate=48_000)
    assert engine_sizes(spec(method="GRPO", resources={"gpuMemoryGiB": gibibytes}), 8, shape) == tensors


@pytest.mark.parametrize(
    ("gibibytes", "placement"),
    [(80, RolloutPlacement.COLOCATED), (22, RolloutPlacement.COLOCATED), (20, RolloutPlacement.SEPARATE)],
)
def test_engines_run_where_a_step_is_shortest(gibibytes: int, placement: RolloutPlacement) -> None:
    """A GPU of 22 GiB holds both trainer and engine, one of 20 GiB does not."""
    fastest = {
        asked: best_layouts(grpo_spec(gibibytes, asked, staleness=0), moe_model(8), 8, H100, limit=1)
        for asked in (None, *RolloutPlacement)
    }
    assert best(fastest[None])[0].rollout.placement is placement
    assert best(fastest[None])[1] == min(best(found)[1] for asked, found in fastest.items() if asked and found)


def test_a_gpu_with_more_memory_is_never_slower() -> None:
    found = [best_layouts(grpo_spec(gibibytes, None), moe_model(8), 8, H100, limit=1) for gibibytes in MORE]
    seconds = [weighed_seconds(choice) for (choice,) in found]
    assert seconds == sorted(seconds, reverse=True)


def test_engines_that_the_job_counts_stay_so_many() -> None:
    counted = grpo_spec(80, RolloutPlacement.SEPARATE, replicas=3)
    (choice,) = best_layouts(counted, moe_model(8), 8, H100, limit=1)
    rollout = best((choice,))[0].rollout
    assert rollout.replicas == 3
    assert choice.layout.gpus == 8 - 3 * rollout.tensor


def test_a_search_with_all_engines_finds_what_one_for_each_of_them_finds() -> None:
    """Engines that leave the trainer the same GPUs are weighed in one search."""
    asked = grpo_spec(40, None, staleness=0)
    (fastest,) = best_layouts(asked, moe_model(8), 8, H100, limit=1)
    separate = [
        best_layouts(
            grpo_spec(40, RolloutPlacement.SEPARATE, tensor=tensor, replicas=replicas, staleness=0),
            moe_model(8),
            8,
            H100,
        )
        for tensor in (1, 2, 4)
        for replicas in range(1, 8 // tensor + 1)
        if replicas * tensor < 7
    ]
    colocated = [
        best_layouts(grpo_spec(40, RolloutPlacement.COLOCATED, tensor=tensor, staleness=0), moe_model(8), 8, H100)
        for tensor in (1, 2, 4, 8)
    ]
    assert fastest.cost.seconds == pytest.approx(min(best(found)[1] for found in (*separate, *colocated) if found))


def test_the_staleness_that_is_chosen_is_worth_its_age() -> None:
    (fastest,) = best_layouts(grpo_spec(40, None), moe_model(8), 8, H100, limit=1)
    given = [
        weighed_seconds(best_layouts(grpo_spec(40, None, staleness=age), moe_model(8), 8, H100, limit=1)[0])
        for age in (0, 1, 2, 4)
    ]
    assert weighed_seconds(fastest) == pytest.approx(min(given))
    assert best((fastest,))[0].rollout.staleness == (0, 1, 2, 4)[given.index(min(given))] > 0


@pytest.mark.parametrize(
    ("gpu_type", "says"),
    [
        pytest.param("H100", "use GPUs with more memory", id="no engine of a node"),
        pytest.param("H200", "use GPUs with more memory", id="no engine of a larger node"),
        pytest.param("B200", None, id="an engine of eight GPUs with 95 % of each"),
    ],
)
def test_a_model_that_no_engine_holds_is_refused_before_the_search(gpu_type: str, says: str | None) -> None:
    asked = spec(method="GRPO", resources={"gpuType": gpu_type})
    problem = find_engine_problem(asked, latent_model(), 512, H100)
    assert (problem is None) if says is None else (problem is not None and problem.message.endswith(says))


@pytest.mark.parametrize(
    ("sections", "paths"),
    [
        pytest.param({}, [], id="nothing is wrong"),
        pytest.param({"parallelism": {"tensor": 3}}, [], id="another layout is chosen anyway"),
        pytest.param({"training": {"deterministic": True}}, ["spec.training.deterministic"], id="no layout mends it"),
    ],
)
def test_problems_of_every_layout_are_those_of_the_job(sections: dict[str, Any], paths: list[str]) -> None:
    asked = spec(method="GRPO", resources={"gpuType": "H200"}, **sections)
    problems = find_constant_problems(asked, moe_model(), 8, H200)
    assert [problem.path for problem in problems] == paths


def weighed_seconds(choice: LayoutChoice) -> float:
    """Seconds of a step, which older answers have to make 3 % faster for each version."""
    grpo = choice.spec.grpo
    return choice.cost.seconds * (1 if grpo is None else 1 + 0.03 * grpo.rollout.staleness)


# Of a GPU that has too little for small engines, for colocated ones, and for neither.
MORE = (16, 18, 22, 26, 40, 80)


def grpo_spec(gibibytes: int, placement: RolloutPlacement | None, **rollout: int) -> Spec:
    asked = rollout | ({} if placement is None else {"placement": placement})
    return spec(
        method="GRPO",
        resources={"gpuMemoryGiB": gibibytes},
        grpo={"rollout": asked},
        storage={"claimName": "mine", "size": None},
    )


def best(found: tuple[LayoutChoice, ...]) -> tuple[Grpo, float]:
    grpo = found[0].spec.grpo
    assert grpo is not None
    return grpo, found[0].cost.seconds


def engine_sizes(asked: Spec, count: int, shape: ModelShape | None = None) -> list[int]:
    sized = [changed.grpo for changed in with_runnable_engines(asked, shape or moe_model(), count)]
    return [grpo.rollout.tensor for grpo in sized if grpo is not None]
