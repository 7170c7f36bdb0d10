"""Evaluations of a run, alike on all its ranks: the best are kept, and a run without a better one for long stops."""

from __future__ import annotations

from collections.abc import Mapping

from builders import spec
from moejob_trainer.evaluation.run_evaluations import RankedEvaluations
from trainer.checkpoints.stand_ins import ThreadCoordinator, ThreadCoordinators

EVALUATED = {"eval": [{"source": "/data/held-out.jsonl", "format": "Chat"}]}


def test_a_run_stops_early_on_all_ranks_when_its_patience_is_at_an_end() -> None:
    def act(rank: ThreadCoordinator) -> tuple[object, ...]:
        stop = {"patience": 2, "minimumImprovement": 0.5}
        job = spec(data=EVALUATED, training={"evalEvery": 10, "earlyStop": stop})
        found = iter([3.0, 2.9, 2.8])
        mine = RankedEvaluations(job, 100, rank, lambda _: {"evalLoss": next(found)} if rank.rank == 0 else {})
        told = [
            (mine.evaluate_if_due(step).get("evaluationsWithoutImprovement"), mine.stopped_at) for step in (10, 20, 30)
        ]
        return told, mine.as_fields().get("stoppedEarly"), mine.stop_reason()

    said = "stopped early at step 30 of 100: 2 evaluations in a row without a better evalLoss than 3 by 0.5"
    assert ThreadCoordinators(2).run_on_ranks(act) == [([(0, None), (1, None), (2, 30)], True, said)] * 2


def test_a_run_at_its_end_does_not_stop_early() -> None:
    def act(rank: ThreadCoordinator) -> object:
        job = spec(data=EVALUATED, training={"evalEvery": 50, "earlyStop": {"patience": 1}})
        mine = RankedEvaluations(job, 100, rank, lambda step: {"evalLoss": float(step)})
        return [mine.evaluate_if_due(step).get("stoppedEarly") for step in (50, 100)]

    assert ThreadCoordinators(1).run_on_ranks(act) == [[None, None]]


def evaluations(rank: ThreadCoordinator, found: Mapping[str, float], **sections: object) -> RankedEvaluations:
    job = spec(data=EVALUATED, training={"evalEvery": 10}, **sections)
    return RankedEvaluations(job, 100, rank, lambda step: found if step % 10 == 0 else {})


def test_all_ranks_know_what_the_first_alone_has_measured() -> None:
    def act(rank: ThreadCoordinator) -> tuple[object, ...]:
        mine = evaluations(rank, {"evalLoss": 2.0} if rank.rank == 0 else {}, checkpoint={"keepBest": 1})
        return (
            mine.evaluate_if_due(9),
            mine.is_among_best(9),
            mine.evaluate_if_due(10).get("bestStep"),
            mine.is_among_best(10),
        )

    assert ThreadCoordinators(2).run_on_ranks(act) == [({}, False, 10, True)] * 2


def test_without_keep_best_no_checkpoint_is_kept_for_its_evaluation() -> None:
    def act(rank: ThreadCoordinator) -> tuple[object, ...]:
        mine = evaluations(rank, {"evalLoss": 2.0})
        return mine.evaluate_if_due(10).get("bestStep"), mine.is_among_best(10)

    assert ThreadCoordinators(1).run_on_ranks(act) == [(10, False)]


def test_scores_by_another_measure_say_nothing_about_those_to_come() -> None:
    def act(rank: ThreadCoordinator) -> list[Mapping[str, float]]:
        mine = evaluations(rank, {})
        mine.load_state_dict({"measure": "evalLoss/other", "best": [{"step": 10, "value": 1.0}]})
        before = mine.as_fields()
        mine.load_state_dict({"measure": "evalLoss", "best": [{"step": 10, "value": 1.0}]})
        return [before, mine.as_fields()]

    assert ThreadCoordinators(1).run_on_ranks(act) == [[{}, {"bestStep": 10, "bestScore": 1.0}]]
