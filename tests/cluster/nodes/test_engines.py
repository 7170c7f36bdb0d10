"""GRPO on two real nodes with vLLM in a pod: from kubectl apply to a score, through faults of its engine.

The first row is for every day; MOEJOB_FAULTS=full does all.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from time import sleep
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from builders import merge_sections
from cluster.control_plane.releases import Release
from cluster.extent import IS_FULL, in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.engines import (
    IMAGE,
    STEPS,
    EnginePod,
    await_answers,
    away_from_trainer,
    job_with_engine,
    kill_engine,
    load_image,
    next_engine,
    pause_engine,
    provide_environment,
    read_answers,
    ready_engine,
    shown_score,
    start_reward_server,
)
from cluster.nodes.fault_harness import RANDOM_MODEL
from cluster.nodes.faults import kill_pod, kill_rank
from cluster.nodes.pods import build_claim
from cluster.nodes.recovery import GangPod, find_gang_pods
from cluster.nodes.strangers import await_address, make_namespace, start_stranger
from cluster.nodes.training import (
    ROOT,
    TRAINER_PYTHON,
    TRAINING_SECONDS,
    VERSION,
    Job,
    Run,
    SubmittedJob,
    run_here,
    submit_job,
)
from cluster.waiting import until
from moejob_api.contract.pods import PodPort

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
VOLUME = "engines"
_numbers = count()
AHEAD_STEPS = 6
# More than a trainer does that is killed twenty times.
KILLED_STEPS = 60


@pytest.fixture(scope="module")
def random_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "random"
    subprocess.run([TRAINER_PYTHON, RANDOM_MODEL, folder], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def engine_release(
    nodes: Cluster, home: Release, random_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Release:
    """The release, on nodes that have the engine's image, and a volume with what that starts and the model."""
    load_image(nodes, tmp_path_factory.mktemp("image"))
    claims = f"/api/v1/namespaces/{home.namespace}/persistentvolumeclaims"
    nodes.plane.api.create(claims, build_claim(VOLUME, "1Gi", None))
    until(
        lambda: nodes.plane.api.get(f"{claims}/{VOLUME}")["status"].get("phase") == "Bound",
        waiting_for=f"a volume for {VOLUME}",
    )
    place = nodes.storage.shared_folder(home.namespace, VOLUME)
    provide_environment(place)
    shutil.copytree(random_model_folder, place / random_model_folder.name)
    for file in (place / random_model_folder.name).iterdir():
        file.chmod(0o644)
    return home


@pytest.fixture(scope="module")
def undisturbed_run(random_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same job without a cluster."""
    return run_here(job_with_engine(str(random_model_folder)), tmp_path_factory.mktemp("undisturbed"))


def generate_ahead(steps: int) -> Job:
    """Changes of a job: answers are written ahead, and every step leaves what a test has to know of its groups."""
    return {
        "spec": {
            "training": {"maxSteps": steps},
            "grpo": {"groupSize": 4, "recordTokens": True, "rollout": {"staleness": 1}},
            "checkpoint": {"everySteps": 1, "keep": steps},
            "storage": {"size": "4Gi"},
        }
    }


@contextmanager
def submit_with_engine(
    nodes: Cluster, home: Release, changes: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[SubmittedJob]:
    """A job with an engine, and its end in any case."""
    name = f"with-engine-{next(_numbers)}"
    changed = merge_sections(job_with_engine(f"pvc://{VOLUME}/random"), changes)
    job = submit_job(nodes, home.namespace, merge_sections(changed, {"metadata": {"name": name}}))
    try:
        yield job
    finally:
        nodes.plane.kubectl("delete", "moetrainingjob", name, f"--namespace={home.namespace}")


def await_generation(job: SubmittedJob, engine: EnginePod) -> dict[str, str]:
    """Wait until an engine computes answers of a later step than the first; the gang's pods."""
    job.await_steps(1)
    await_answers(job, engine)
    return job.pod_uids()


def assert_gang_untouched(job: SubmittedJob, gang: dict[str, str]) -> None:
    """The job ends well with the pods and the ranks that it had, and each step was done once."""
    job.await_end()
    assert job.pod_uids() == gang
    restarts = job.read()["status"]["restarts"]
    assert (restarts["total"], restarts["pods"], restarts["ranks"]) == (0, 0, 0)
    assert job.run().steps() == [(0, 0, step) for step in range(1, STEPS + 1)]
    for step, said in read_answers(job.run()).items():
        assert {answer["version"] for answer in said} == {step - 1}


def await_trainer(job: SubmittedJob) -> GangPod:
    """Wait until the only trainer has its rank."""

    def find_trainer() -> GangPod | None:
        return next((member for member in find_gang_pods(job).values() if member.rank), None)

    trainer = until(find_trainer, seconds=TRAINING_SECONDS, waiting_for=job.describe)
    assert trainer is not None
    return trainer


def suspend(job: SubmittedJob) -> None:
    """Stop a job: its launchers let ranks save, and end."""
    job.set_suspended()
    until(lambda: job.phase == "Suspended" and not job.list_pods(), seconds=TRAINING_SECONDS, waiting_for=job.describe)


def await_weights(job: SubmittedJob) -> None:
    """Wait until weights of another version begin to travel to the engine."""
    folder = job.run().folder / "weights"

    def read_labels() -> set[str]:
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    labels = read_labels()
    until(lambda: read_labels() - labels, seconds=TRAINING_SECONDS, waiting_for=job.describe)


def await_checkpoint(job: SubmittedJob) -> None:
    """Wait for a checkpoint of a later step than those that are complete."""
    newest = max(job.run().checkpoints(), default=0)
    until(
        lambda: max(job.run().checkpoints(), default=0) > newest,
        seconds=TRAINING_SECONDS,
        waiting_for=job.describe,
    )


def require_prompts_kept(*jobs: SubmittedJob, steps: int = AHEAD_STEPS) -> None:
    """Each prompt that was drawn was taken by one step or is in the checkpoint; no token is older than one version."""
    folders = [str(job.run().folder) for job in jobs]
    command = [str(TRAINER_PYTHON), "-m", "trainer.rollouts.recorded_groups", *folders, str(steps)]
    check = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    for job in jobs:
        for step, answers in read_answers(job.run()).items():
            assert {answer["version"] for answer in answers} <= {max(step - 2, 0), step - 1}


def assert_like(run: Run, other: Run) -> None:
    """All answers are those of the other run, what they were paid, and what was learned of them."""
    assert read_answers(run) == read_answers(other)
    assert run.losses() == pytest.approx(other.losses(), abs=1e-5)


def test_an_engine_that_is_killed_while_it_generates_is_started_again_in_its_pod(
    nodes: Cluster, engine_release: Release, request: pytest.FixtureRequest
) -> None:
    with submit_with_engine(nodes, engine_release) as job:
        engine = ready_engine(job)
        gang = await_generation(job, engine)
        kill_engine(job, engine)
        now = next_engine(job, engine)
        assert (now.uid, now.restarts) == (engine.uid, engine.restarts + 1)
        assert_gang_untouched(job, gang)
        score = job.run().read_step_log()[-1]["reward"]
        assert float(shown_score(nodes, job)) == pytest.approx(score, abs=1e-3)
        if IS_FULL:
            assert_like(job.run(), request.getfixturevalue("undisturbed_run"))


@in_full
def test_a_stranger_can_neither_ask_an_engine_nor_give_it_weights(nodes: Cluster, engine_release: Release) -> None:
    with submit_with_engine(nodes, engine_release) as job, make_namespace(nodes) as other:
        engine = ready_engine(job)
        marks = nodes.plane.api.get(f"/api/v1/namespaces/{job.namespace}/pods/{engine.name}")["metadata"]["labels"]
        image = f"moejob-trainer-cpu:{VERSION}"
        strangers = [
            start_stranger(nodes, job.namespace, image, "node-1"),
            start_stranger(nodes, job.namespace, image, "node-2", marks),
            start_stranger(nodes, other, image, "node-2"),
        ]
        host = await_address(nodes, job.namespace, engine.name)
        gang = await_generation(job, engine)
        for one in strangers:
            said = one.run_tries((verb, host, PodPort.ROLLOUT.value) for verb in ("ask", "give_weights"))
            assert set(said.values()) == {"HTTP/1.1 401 Unauthorized"}
        for one in strangers[:2]:
            nodes.plane.kubectl("delete", "pod", one.pod, f"--namespace={one.namespace}")
        assert_gang_untouched(job, gang)


@in_full
def test_an_engine_whose_pod_is_deleted_while_it_generates_is_replaced(
    nodes: Cluster, engine_release: Release, undisturbed_run: Run
) -> None:
    with submit_with_engine(nodes, engine_release) as job:
        engine = ready_engine(job)
        gang = await_generation(job, engine)
        kill_pod(nodes, job.namespace, engine.name)
        assert next_engine(job, engine).uid != engine.uid
        assert_gang_untouched(job, gang)
        assert_like(job.run(), undisturbed_run)


@in_full
def test_an_engine_on_a_node_that_is_cut_off_is_replaced_on_another(
    nodes: Cluster, engine_release: Release, undisturbed_run: Run
) -> None:
    with submit_with_engine(nodes, engine_release) as job:
        engine = away_from_trainer(job)
        gang = await_generation(job, engine)
        nodes.cut_off(engine.node)
        try:
            assert next_engine(job, engine).node != engine.node
            assert_gang_untouched(job, gang)
        finally:
            nodes.reconnect(engine.node)
            nodes.await_ready(engine.node)
        assert_like(job.run(), undisturbed_run)


Fault = Callable[[SubmittedJob, EnginePod], object]


@in_full
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(kill_engine, id="killed"),
        pytest.param(pause_engine, id="hung"),
        pytest.param(lambda job, engine: kill_pod(job.nodes, job.namespace, engine.name), id="deleted"),
    ],
)
@pytest.mark.parametrize("is_publishing", [False, True], ids=["answers in flight", "weights on their way"])
def test_an_engine_that_is_lost_while_it_generates_ahead_costs_no_prompt(
    fault: Fault, is_publishing: bool, nodes: Cluster, engine_release: Release
) -> None:
    with submit_with_engine(nodes, engine_release, generate_ahead(AHEAD_STEPS)) as job:
        engine = ready_engine(job)
        gang = await_generation(job, engine)
        if is_publishing:
            await_weights(job)
        fault(job, engine)
        next_engine(job, engine)
        job.await_end()
        assert job.pod_uids() == gang
        assert job.run().steps() == [(0, 0, step) for step in range(1, AHEAD_STEPS + 1)]
        require_prompts_kept(job)


@in_full
@pytest.mark.parametrize("is_publishing", [False, True], ids=["answers in flight", "weights on their way"])
def test_an_engine_that_is_cut_off_while_it_generates_ahead_costs_no_prompt(
    is_publishing: bool, nodes: Cluster, engine_release: Release
) -> None:
    with submit_with_engine(nodes, engine_release, generate_ahead(AHEAD_STEPS)) as job:
        engine = away_from_trainer(job)
        await_generation(job, engine)
        if is_publishing:
            await_weights(job)
        nodes.cut_off(engine.node)
        try:
            assert next_engine(job, engine).node != engine.node
            job.await_end()
        finally:
            nodes.reconnect(engine.node)
            nodes.await_ready(engine.node)
        require_prompts_kept(job)


@in_full
def test_a_trainer_that_is_killed_at_twenty_moments_takes_each_prompt_once(
    nodes: Cluster, engine_release: Release
) -> None:
    random = Random(45)
    # Kills before the first checkpoint of a start are counted, and all checkpoints stay.
    changes = {"lifecycle": {"backoffLimit": 40}, "storage": {"size": "12Gi"}}
    patient = merge_sections(generate_ahead(KILLED_STEPS), {"spec": changes})
    with submit_with_engine(nodes, engine_release, patient) as job:
        engine = ready_engine(job)
        for moment in range(20):
            # A new checkpoint ends the delays of restarts, which grow with each failure. Every second kill follows one,
            # and hits any part of a step; the others hit a start, from before its ranks meet.
            if moment % 2 == 0:
                await_checkpoint(job)
            await_trainer(job)
            sleep(random.uniform(0, 15))
            kill_rank(await_trainer(job))
        assert ready_engine(job) == engine
        job.await_steps(2)
        suspend(job)
        require_prompts_kept(job, steps=job.run().last_step())


@in_full
@pytest.mark.parametrize(
    "waited_seconds", [pytest.param(600, id="and waited for"), pytest.param(1, id="and ranks are started again")]
)
def test_a_reward_server_that_is_down_while_answers_are_written_ahead_costs_no_prompt(
    waited_seconds: int, nodes: Cluster, engine_release: Release
) -> None:
    server = start_reward_server(nodes, engine_release.namespace)
    reward = {"url": server.url, "unavailableTimeoutSeconds": waited_seconds, "metricName": "letters"}
    changes = merge_sections(generate_ahead(AHEAD_STEPS), {"spec": {"grpo": {"rewards": [reward]}}})
    with submit_with_engine(nodes, engine_release, changes) as job:
        gang, rank = await_generation(job, ready_engine(job)), await_trainer(job).rank
        server.stop()
        until(lambda: "is away" in job.read_trainer_log(), seconds=TRAINING_SECONDS, waiting_for=job.describe)
        if waited_seconds == 1:
            until(lambda: await_trainer(job).rank != rank, seconds=TRAINING_SECONDS, waiting_for=job.describe)
        server.start()
        job.await_end()
        restarts = job.read()["status"]["restarts"]
        # Ranks that fail a third time before the server is there have cost their pod.
        assert bool(restarts["ranks"] + restarts["pods"]) is (waited_seconds == 1)
        if waited_seconds > 1:
            assert job.pod_uids() == gang
        require_prompts_kept(job)
    server.stop()


@in_full
def test_a_launcher_that_is_stopped_while_answers_are_written_ahead_is_continued_in_another_layout(
    nodes: Cluster, engine_release: Release
) -> None:
    with submit_with_engine(nodes, engine_release, generate_ahead(AHEAD_STEPS)) as stopped:
        await_generation(stopped, ready_engine(stopped))
        suspend(stopped)
        done = stopped.run().last_step()
        assert 0 < done < AHEAD_STEPS
        source = f"pvc://{stopped.name}-storage/{stopped.name}"
        wider = {
            "spec": {
                "parallelism": {"data": 2},
                "checkpoint": {"resumeFrom": source, "resume": "Run"},
            }
        }
        with submit_with_engine(nodes, engine_release, merge_sections(generate_ahead(AHEAD_STEPS), wider)) as job:
            job.await_end()
            assert len(job.pod_uids()) == 2
            assert [step for *_, step in job.run().steps()] == [*range(done + 1, AHEAD_STEPS + 1)]
            require_prompts_kept(stopped, job)


@in_full
def test_the_examples_of_the_tutorial_teach_and_then_reward_a_model(nodes: Cluster, engine_release: Release) -> None:
    taught, learned = (
        yaml.safe_load((ROOT / f"examples/{name}.yaml").read_text()) for name in ("tiny-sft-sums", "tiny-grpo")
    )
    # Nodes here have two cores, and the operator's replicas their share of them.
    small = {"spec": {"resources": {"cpu": "200m", "rolloutImage": IMAGE}}}
    source = {"spec": {"model": {"source": "pvc://tiny-sft-sums-storage/tiny-sft-sums/export"}}}
    first = submit_job(
        nodes, engine_release.namespace, merge_sections(taught, {"spec": {"resources": {"cpu": "200m"}}})
    )
    first.await_end()
    provide_environment(nodes.storage.shared_folder(engine_release.namespace, "tiny-sft-sums-storage"))
    second = submit_job(nodes, engine_release.namespace, merge_sections(merge_sections(learned, small), source))
    second.await_end()
    steps = learned["spec"]["training"]["maxSteps"]
    assert second.run().steps() == [(0, 0, step) for step in range(1, steps + 1)], second.describe()
    rewards = [line["reward"] for line in second.run().read_step_log()]
    assert sum(rewards[-5:]) / 5 > 0.9
    assert float(shown_score(nodes, second)) == pytest.approx(rewards[-1], abs=1e-3)
