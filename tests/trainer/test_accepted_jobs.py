"""One gate: a random job that `plan` accepts starts and makes a step, or the gate is wrong.

Jobs are drawn over family, layout, dispatcher, LoRA, sharding and types, with tiny shapes of their family. Every one
that `plan` accepts is run as ranks run it: model check, data, a step, an evaluation with answers, a checkpoint, an
export. Jobs of GRPO need
engines and are tested beside those. MOEJOB_ACCEPTED_JOBS says how many are run; `make test-gate` draws many other ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from builders import merge_sections, spec
from model_configs import config as small_config
from moejob_api.derived import trained_shape
from moejob_api.job.training import RecomputeModule
from moejob_api.layout.sizes import count_gpus
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_api.planner.plan import plan_job
from moejob_api.rules import layout_problems
from moejob_trainer.data import tiny
from trainer.parity.cells import MODELS
from trainer.runs import TINY, Runs

COUNT = int(os.environ.get("MOEJOB_ACCEPTED_JOBS", "12"))
MOST_RANKS = 4
VOCABULARY = 512
FAMILIES = sorted(Family)
Drawn = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A model, as changes of its family's small config, and the sections of a job."""

    family: Family
    layers: int
    tied: bool
    sections: Mapping[str, Any]

    def config(self) -> dict[str, Any]:
        own = MODELS.get(self.family, {}) | {"num_hidden_layers": self.layers, "vocab_size": VOCABULARY}
        tied = {"tie_word_embeddings": self.tied}
        return small_config(self.family, **own | tied, initializer_range=0.1, max_position_embeddings=128)

    def with_source(self, source: str) -> Drawn:
        """The sections, over those of every test's run."""
        given = {"model": {"source": source}, "training": {"maxSteps": 1}}
        return merge_sections(given, self.sections)

    def is_accepted(self) -> bool:
        job = spec(**merge_sections(TINY, self.with_source("/models/drawn")))
        if count_gpus(job.parallelism) > MOST_RANKS:
            return False
        shape = trained_shape(shape_of(self.config(), "config.json"), job)
        # First the part that costs nothing: the plan of a job that is refused looks for others.
        return not layout_problems(job, shape) and plan_job(job, shape).is_accepted


def _section(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Drawn]:
    return st.fixed_dictionaries({}, optional=fields)


_HELD_OUT = {"source": tiny.CHATS, "format": "Chat", "split": "test"}
_ASKED = {"source": tiny.SUMS, "format": "Prompts", "split": "test"}
_TARGETS = ("QueryKeyValue", "AttentionOutput", "GateUp", "Down", "ExpertGateUp", "ExpertDown")
_RECOMPUTED = tuple(module.value for module in RecomputeModule)
_RECOMPUTE: st.SearchStrategy[Drawn] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"granularity": st.just("Selective")},
        optional={"modules": st.lists(st.sampled_from(_RECOMPUTED), min_size=1, max_size=3, unique=True)},
    ),
    st.fixed_dictionaries(
        {"granularity": st.just("Full")},
        optional={"method": st.sampled_from(["Uniform", "Block"]), "layers": st.integers(1, 3)},
    ),
)
_LORA = st.fixed_dictionaries(
    {
        "rank": st.sampled_from([2, 4, 6]),
        "targets": st.lists(st.sampled_from(_TARGETS), min_size=1, max_size=4, unique=True),
    },
    optional={"dropout": st.sampled_from([0.0, 0.1])},
)
_SCHEDULER = st.fixed_dictionaries(
    {"kind": st.sampled_from(["Constant", "Linear", "Cosine", "WSD"])},
    optional={"warmupSteps": st.integers(0, 1), "decaySteps": st.just(1)},
)
PARALLELISM = _section(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 3]),
    expert=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2, 3]),
    expertLayout=st.sampled_from(["Product", "Folded"]),
    expertTensor=st.sampled_from([1, 2]),
    virtualPipeline=st.sampled_from([1, 2, 3]),
    firstStageLayers=st.integers(1, 3),
    lastStageLayers=st.integers(1, 3),
    embeddingCountsAsLayer=st.booleans(),
    lossCountsAsLayer=st.booleans(),
    sequence=st.booleans(),
)
TRAINING = _section(
    globalBatchSize=st.integers(1, 8),
    microBatchSize=st.integers(1, 2),
    dynamicBatchTokens=st.sampled_from([64, 96]),
    recompute=_RECOMPUTE,
    precision=_section(
        compute=st.just("FP8"),
        gradients=st.sampled_from(["float32", "bfloat16"]),
        moments=st.sampled_from(["float32", "bfloat16"]),
    ),
    scheduler=_SCHEDULER,
    clipGrad=st.sampled_from([0.0, 1.0]),
    lora=_LORA,
    mtpLossCoefficient=st.sampled_from([0.0, 0.1]),
    evalEvery=st.just(1),
    evalAnswers=st.fixed_dictionaries(
        {"prompts": st.just(3), "maxNewTokens": st.sampled_from([1, 4])},
        optional={"reward": st.sampled_from(["exact-match", "numeric"])},
    ),
    earlyStop=st.just({"patience": 1}),
    deterministic=st.booleans(),
    profile=st.fixed_dictionaries({"firstStep": st.just(1)}, optional={"memory": st.booleans()}),
)
MOE = _section(
    freezeRouter=st.booleans(),
    routerDtype=st.sampled_from(["float32", "float64"]),
    balancing=st.sampled_from(["AuxLoss", "SeqAuxLoss", "GlobalAuxLoss", "ExpertBias", "None"]),
    zLossCoefficient=st.sampled_from([0.0, 1e-3]),
    seqAuxLossCoefficient=st.sampled_from([0.0, 1e-3]),
    capacityFactor=st.sampled_from([0.5, 1.0, 2.0]),
    dispatcher=st.sampled_from(["AllToAll", "AllGather", "Flex"]),
)
DATA = _section(
    packing=st.booleans(),
    shuffle=st.booleans(),
    overlong=st.sampled_from(["Drop", "Truncate"]),
    maxLength=st.sampled_from([48, 64, 102]),
    eval=st.sampled_from([[_HELD_OUT], [_ASKED], [_HELD_OUT, _ASKED]]),
)
JOBS = st.builds(
    Job,
    st.sampled_from(FAMILIES),
    st.integers(1, 5),
    st.booleans(),
    st.fixed_dictionaries(
        {
            "parallelism": PARALLELISM,
            "training": TRAINING,
            "moe": MOE,
            "data": DATA,
            "model": _section(dtype=st.sampled_from(["float32", "bfloat16"])),
            "memory": _section(sharding=st.sampled_from(["DistributedOptimizer", "ZeRO2", "FSDP"])),
            "checkpoint": _section(
                **{"async": st.booleans(), "exportHuggingFace": st.booleans(), "keepBest": st.just(1)}
            ),
        }
    ),
).filter(Job.is_accepted)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    started = Runs(tmp_path_factory.mktemp("accepted") / "volume")
    yield started
    started.close()


def model_folder(job: Job, volume: Path) -> Path:
    """The drawn model as one would download it, with random weights; written when first asked for."""
    folder = volume / f"{job.family}-{job.layers}-{job.tied}"
    if not folder.exists():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**job.config())).save_pretrained(folder)
        tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.slow
@settings(max_examples=COUNT, suppress_health_check=list(HealthCheck))
@given(job=JOBS)
def test_a_job_that_plan_accepts_starts_and_makes_a_step(runs: Runs, job: Job) -> None:
    folder = model_folder(job, runs.volume)
    try:
        runs.run_to_end("drawn", **job.with_source(str(folder)))
    finally:
        shutil.rmtree(runs.volume / "drawn")
