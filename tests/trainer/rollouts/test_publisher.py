"""Publications of weights through a folder: the proof, a full volume, engines that fail on the way, several ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from moejob_api.contract.publications import PublicationReport
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetLimits, NoEngineAvailable, RolloutEngine
from moejob_trainer.rollouts.interface import SyncReport, WrongWeights
from moejob_trainer.rollouts.publisher import ExpectedProbe, ProbeTerms, Publisher, probe_problem, unreached_warning
from moejob_trainer.rollouts.transports.disk import DiskTransport, NoDiskSpace
from moejob_trainer.rollouts.wire import WeightsLabel
from trainer.rollouts.stand_in import StandIn, until
from trainer.worlds import Worlds

LIMITS = FleetLimits(start_seconds=120, silence_seconds=60, answer_seconds=120, look_seconds=0.02)
# What stand-ins say of every token.
SAID = -1.0
LABEL = WeightsLabel(3, "here")


def weights(rank: int = 0) -> Iterator[tuple[str, Tensor]]:
    yield f"{rank}.first", torch.full((3, 5), float(rank))
    yield f"{rank}.second", torch.arange(7, dtype=torch.bfloat16)


class Run:
    """A trainer of one rank, or the first of several, and its stand-in engines."""

    def __init__(self, folder: Path, count: int = 2, trainers: float = SAID, seconds: float = 60) -> None:
        self.engines = [StandIn(probe=SAID) for _ in range(count)]
        self.transport = DiskTransport(folder, None, seconds)
        self.trainers = trainers
        self.start(LIMITS)

    def start(self, limits: FleetLimits) -> None:
        self.connection = EngineConnection("secret")
        self.fleet = EngineFleet([engine.url for engine in self.engines], self.connection, limits)
        self.publisher = Publisher(
            fleet=self.fleet, world=None, transport=self.transport, probe_terms=trial(self.trainers)
        )

    def restart(self, limits: FleetLimits) -> None:
        """Start the trainer again beside its engines."""
        self.publisher.close()
        self.start(limits)

    def close(self) -> None:
        self.publisher.close()
        for engine in self.engines:
            engine.close()


def trial(trainers: float, bound: float = 0.001, *, only_warns: bool = False) -> ProbeTerms:
    tokens = np.arange(48, dtype=np.int32)
    return ProbeTerms(tokens, lambda text: np.full(len(text) - 1, trainers, np.float32), lambda: bound, only_warns)


Make = Callable[..., Run]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Run] = []

    def run(folder: Path = tmp_path, **options: Any) -> Run:
        made.append(Run(folder, **options))
        return made[-1]

    yield run
    for one in made:
        one.close()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_all_engines_get_the_weights_and_their_name(make: Make, tmp_path: Path) -> None:
    run = make()
    report = run.publisher.publish(5, weights())
    assert (report.version, report.size_bytes) == (5, 3 * 5 * 4 + 7 * 2)
    assert (report.probe_mean, report.probe_maximum) == (0.0, 0.0)
    assert {engine.version for engine in run.engines} == {str(run.fleet.label)}
    assert len(run.fleet.serving_engines) == 2
    (file,) = files(tmp_path)
    with safe_open(file, "pt") as written:
        assert {name: written.get_tensor(name).tolist() for name in written.keys()} == {  # noqa: SIM118  # no mapping
            name: tensor.tolist() for name, tensor in weights()
        }


def test_the_files_of_a_version_go_with_the_next_one_and_at_the_end(make: Make, tmp_path: Path) -> None:
    run = make()
    run.publisher.publish(5, weights())
    (first,) = files(tmp_path)
    run.publisher.publish(6, weights())
    (second,) = files(tmp_path)
    assert first != second
    run.transport.close()
    assert files(tmp_path) == []


def test_engines_with_other_probabilities_stop_the_run_with_both_numbers(make: Make) -> None:
    run = make(trainers=-1.25)
    with pytest.raises(
        WrongWeights,
        match=r"-1\.00000 and the trainer -1\.25000; .* 0\.25000 where 0\.001.* grpo\.rollout\.probe\.bound",
    ):
        run.publisher.publish(1, weights())


def test_the_bound_is_measured_again_after_a_publication_that_was_wrong(make: Make) -> None:
    run, bounds = make(trainers=-1.25), iter([0.2, 0.3])
    tokens = run.publisher.probe_terms.tokens
    run.publisher.probe_terms = ProbeTerms(
        tokens, lambda text: np.full(len(text) - 1, -1.25, np.float32), lambda: next(bounds)
    )
    with pytest.raises(WrongWeights, match=r"0\.25000 where 0\.2 is"):
        run.publisher.publish(1, weights())
    reports = [run.publisher.publish(version, weights()) for version in (1, 2)]
    assert [(report.probe_mean, report.probe_bound) for report in reports] == [(0.25, 0.3)] * 2
    assert len(run.fleet.serving_engines) == 2


def test_a_tensor_that_is_missing_stops_the_run_by_name_before_it_is_computed_with(make: Make) -> None:
    run = make()
    run.publisher.probe_terms = trial(SAID, only_warns=True)
    whole, lacking = run.engines
    lacking.report = PublicationReport(missing=("model.norm.weight",), repeated=("a.weight", "b.weight"), changed=())
    with pytest.raises(
        WrongWeights, match=r"1 tensors are missing or incomplete: model\.norm\.weight; 2 tensors came twice: a.*, b"
    ):
        run.publisher.publish(1, weights())
    # The update has ended without a version, and both take the next one.
    assert [engine.version for engine in run.engines] == ["unfinished"] * 2
    assert "/resume" not in whole.asked + lacking.asked
    lacking.report = whole.report
    assert run.publisher.publish(1, weights()).version == 1
    assert len(run.fleet.serving_engines) == 2


def test_an_engine_that_was_away_and_lacks_a_tensor_gets_no_work(make: Make) -> None:
    run = make()
    away, _ = run.engines
    run.publisher.publish(5, weights())
    away.stop()
    until(lambda: len(run.fleet.serving_engines) == 1, "the engine serves still")
    away.report, away.version = PublicationReport(missing=("model.norm.weight",), repeated=(), changed=()), "default"
    away.start()
    until(lambda: "model.norm.weight" in run.fleet.describe_problems(), "the engine does not report what it lacks")
    assert len(run.fleet.serving_engines) == 1


def test_a_mismatch_that_only_warns_is_said_and_measured(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    run = make()
    run.publisher.probe_terms = trial(-1.25, only_warns=True)
    report = run.publisher.publish(1, weights())
    assert (report.probe_mean, report.probe_bound) == (0.25, 0.001)
    assert "warning: after a synchronization" in capsys.readouterr().err
    assert len(run.fleet.serving_engines) == 2


@pytest.mark.parametrize(
    ("theirs", "is_wrong"),
    [
        pytest.param([-1.0, -2.0], False, id="equal"),
        pytest.param([-1.0, -2.01], False, id="as far as allowed"),
        pytest.param([-1.5, -1.5], True, id="equal in the mean only"),
        pytest.param([float("nan"), -2.0], True, id="not a number"),
    ],
)
def test_a_probe_is_compared_token_by_token(theirs: list[float], is_wrong: bool) -> None:
    said, expected = np.array(theirs, np.float32), ExpectedProbe(np.array([-1.0, -2.0], np.float32), 0.01)
    assert (probe_problem(expected, [("there", said)]) is not None) == is_wrong


def test_one_wrong_engine_among_right_ones_is_seen() -> None:
    right, other = np.array([-1.0], np.float32), np.array([-3.0], np.float32)
    assert "second" in str(probe_problem(ExpectedProbe(right, 0.01), [("first", right), ("second", other)]))


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/publication", "/finish_weight_update", "/resume"]
)
def test_an_engine_that_fails_on_the_way_serves_no_more_and_the_others_do(make: Make, path: str) -> None:
    run = make()
    failing, working = run.engines
    failing.failing[path] = 500
    assert run.publisher.publish(2, weights()).version == 2
    looked = failing.asked.count("/weight_info")
    until(lambda: failing.asked.count("/weight_info") >= looked + 3, "nothing looks after the engine")
    assert [engine.url for engine in run.fleet.serving_engines] == [working.url]
    del failing.failing[path]
    until(lambda: len(run.fleet.serving_engines) == 2, "the engine does not serve again")


def test_the_log_names_engines_that_a_publication_has_not_reached(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make()
    gone, _ = run.engines
    run.publisher.publish(5, weights())
    assert capsys.readouterr().err == ""
    gone.stop()
    until(lambda: len(run.fleet.serving_engines) == 1, "the engine serves still")
    run.publisher.publish(6, weights())
    lost, missed = capsys.readouterr().err.splitlines()
    assert lost.startswith(f"warning: engine {gone.url}/weight_info cannot be reached: ")
    assert missed.startswith(
        "warning: the weights of step 6 have reached 1 of 2 engines; each of the others gets no work"
    )
    assert f" reads them by itself once it answers: {gone.url}/ready cannot be reached: " in missed
    gone.start()
    until(lambda: len(run.fleet.serving_engines) == 2, "the engine does not serve again")
    assert capsys.readouterr().err == f"engine {gone.url} serves again, with weights {run.fleet.label}\n"


def test_an_engine_that_cannot_read_weights_later_waits_for_the_next_publication() -> None:
    said = unreached_warning(
        [RolloutEngine("http://a"), RolloutEngine("http://b", is_serving=True)], LABEL, is_read_later=False
    )
    assert str(said).endswith(
        "3 have reached 1 of 2 engines; each of the others gets no work and waits for the next publication: "
        "http://a has not been heard yet"
    )


def test_without_engines_it_says_so(make: Make) -> None:
    run = make(count=1, seconds=0.2)
    run.engines[0].failing["/ready"] = 503
    with pytest.raises(NoEngineAvailable, match=r"no engine is ready after 0\.2 s: .* answered 503"):
        run.publisher.publish(2, weights())


def test_ranks_that_start_again_without_an_engine_go_on_and_bring_it_to_their_weights_later(make: Make) -> None:
    run = make()
    run.publisher.publish(5, weights())
    gone, living = run.engines
    gone.stop()
    before = gone.version
    living.asked.clear()
    run.restart(replace(LIMITS, return_seconds=0))
    run.publisher.publish(5, weights())
    assert living.asked.count("/ready") == 1, "it waited for the other, though not for ever"
    assert [engine.url for engine in run.fleet.serving_engines] == [living.url]
    assert (living.version, gone.version) == (str(run.fleet.label), before)
    gone.start()
    until(lambda: len(run.fleet.serving_engines) == 2, "the engine does not serve again")
    assert gone.version == living.version


def test_a_full_volume_is_named_and_engines_keep_what_they_have(make: Make, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], check=False).returncode:  # noqa: S607
        pytest.skip("a small volume cannot be mounted here")
    try:
        run = make(folder=small)
        run.publisher.publish(1, weights())
        before = [engine.version for engine in run.engines]
        large = iter([("large", torch.zeros(100_000))])
        with pytest.raises(
            NoDiskSpace, match=r"bytes free and weights of 400,000 bytes do not fit .*grpo\.rollout\.sync"
        ):
            run.publisher.publish(2, large)
        assert [engine.version for engine in run.engines] == before
        assert len(run.fleet.serving_engines) == 2
        assert files(small) == []
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)  # noqa: S607


def test_every_rank_writes_what_it_owns(worlds: Worlds, tmp_path: Path) -> None:
    reports = worlds.run(2, published_by_ranks, tmp_path)
    assert [report.version for report in reports] == [4, 4]
    assert reports[0].size_bytes == 2 * (3 * 5 * 4 + 7 * 2)
    names = set()
    for file in files(tmp_path):
        with safe_open(file, "pt") as written:
            names |= set(written.keys())
    assert names == {"0.first", "0.second", "1.first", "1.second"}


def published_by_ranks(folder: Path) -> SyncReport:
    """Rank 0 has the engine, each rank its own weights."""
    world, rank = dist.new_group(backend="gloo"), dist.get_rank()
    transport = DiskTransport(folder, world, 60)
    if rank:
        return Publisher(fleet=None, world=world, transport=transport, probe_terms=trial(SAID)).publish(
            4, weights(rank)
        )
    engine, connection = StandIn(probe=SAID), EngineConnection(None)
    fleet = EngineFleet([engine.url], connection, LIMITS)
    try:
        return Publisher(fleet=fleet, world=world, transport=transport, probe_terms=trial(SAID)).publish(
            4, weights(rank)
        )
    finally:
        connection.run(fleet.stop_watching())
        connection.close()
        engine.close()
