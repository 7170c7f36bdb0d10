"""Standstill of a job over two real nodes after a fault, part by part; needs root and Go.

    PYTHONPATH=tests:scripts python -m benchmarks.recovery [--times N] [--only WORD] [--dry]

Every loss of every step is compared with that of a run that nothing was done to.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contest.arena import median, quantile
from benchmarks.record import Better, Result, measured_on, record
from cluster.binaries import KUBERNETES
from cluster.by_hand import end_when_asked, say
from cluster.nodes.cluster import Settings, find_programs, run_cluster
from cluster.nodes.fault_harness import EVERY, STEPS_AT_RISK, FaultHarness, start_fault_harness
from cluster.nodes.faults import damage_checkpoint, kill_operator_and_pod, kill_pod, kill_processes, kill_rank
from cluster.nodes.images import write_variant
from cluster.nodes.obstacles import find_obstacles
from cluster.nodes.recovery import GangPod, OutageParts, Recovery, TargetJob, measure_recovery
from cluster.nodes.training import VERSION, install_release
from images import build_image

BENCH = "recovery"
COLD_IMAGE = f"moejob-trainer-cold:{VERSION}"
PARTS = OutageParts.__slots__
# Of a job, until it is at risk again.
STEPS_PER_FAULT = 3 * EVERY
Fault = Callable[[FaultHarness, TargetJob, Mapping[int, GangPod]], None]


def rank_killed(_: FaultHarness, __: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """SIGKILL."""
    kill_rank(pods[1])


def pod_killed(harness: FaultHarness, _: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """Deleted without grace."""
    kill_pod(harness.nodes, harness.home.namespace, pods[1].name)


def processes_killed(_: FaultHarness, __: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """All of a pod, by SIGKILL: no rank can save."""
    kill_processes(pods[1])


def first_pod_killed(harness: FaultHarness, _: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """The one that the others meet at."""
    kill_pod(harness.nodes, harness.home.namespace, pods[0].name)


def checkpoint_damaged(_: FaultHarness, target: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """And a rank killed, which has to pass it over."""
    damage_checkpoint(target.run.checkpoints()[max(target.run.checkpoints())])
    kill_rank(pods[1])


def operator_killed(harness: FaultHarness, _: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """And a pod, which no process answers for until it is back."""
    kill_operator_and_pod(harness.nodes, harness.home.namespace, pods[1].name)


def second_node_cut_off(harness: FaultHarness, _: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """That of one pod of two."""
    harness.nodes.cut_off(pods[1].node)


def first_node_cut_off(harness: FaultHarness, _: TargetJob, pods: Mapping[int, GangPod]) -> None:
    """That of the pod that the others meet at."""
    harness.nodes.cut_off(pods[0].node)


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. Where a node is cut off every one needs a job of its own: afterwards all pods are on the other."""

    name: str
    fault: Fault
    target_seconds: float | None = None
    is_cold: bool = False
    cuts: int | None = None
    # This many have to be there: one is left when one is damaged.
    checkpoints: int = 1
    # Further pods. Once one has taken a place, the index of a pod does not say its ranks: each fault has its own job.
    spares: int = 0

    @property
    def faults_per_job(self) -> int | None:
        """One, or None for as many as are measured."""
        return None if self.cuts is None and self.spares == 0 else 1


ROWS = (
    Row("rank killed", rank_killed, 1.2),
    Row("rank killed, no warm start", rank_killed, is_cold=True),
    Row("pod killed", pod_killed, 20.0),
    Row("pod killed, no warm start", pod_killed, is_cold=True),
    Row("all processes of a pod killed", processes_killed, 20.0),
    Row("first pod killed", first_pod_killed),
    Row("first pod killed, no warm start", first_pod_killed, is_cold=True),
    Row("pod killed, with a spare", pod_killed, spares=1),
    Row("first pod killed, with a spare", first_pod_killed, spares=1),
    Row("newest checkpoint damaged, and a rank killed", checkpoint_damaged, checkpoints=2),
    Row("operator killed, and a pod", operator_killed),
    Row("node cut off", second_node_cut_off, 60.0, cuts=1),
    Row("node of the first pod cut off", first_node_cut_off, 60.0, cuts=0),
)


def main() -> int:
    """Measure, and write the page. Says what is missing where nothing can be measured."""
    asked = _arguments()
    if reasons := find_obstacles(Settings()):
        say(f"no real nodes on this machine: {'; '.join(reasons)}")
        return 1
    end_when_asked()
    rows = [row for row in ROWS if asked.only is None or asked.only in row.name]
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="moejob-bench-") as folder:
        results = _measure_rows(Path(folder), rows, asked.times)
    if asked.only is None and not asked.dry:
        record(results, ["pydantic"], f"Kubernetes {KUBERNETES.version}, load average before {load:.1f}", table)
    else:
        say(table(results, {"machine": "this machine", "stack": "not recorded", "commit": "this one"}))
    return 0


def _measure_rows(folder: Path, rows: Sequence[Row], times: int) -> list[Result]:
    with run_cluster(folder, find_programs(say)) as nodes, install_release(nodes, folder) as home:
        nodes.load_images(
            {COLD_IMAGE: write_variant(folder / "cold", build_image("trainer-cpu"), {"Cmd": ["--preload="]})}
        )
        with start_fault_harness(nodes, home, folder, steps=EVERY + STEPS_PER_FAULT * (times + 1)) as opened:
            return [result for row in rows for result in _results(row, list(_recoveries(opened, row, times)))]


def _recoveries(harness: FaultHarness, row: Row, times: int) -> Iterator[Recovery]:
    faults_per_job = row.faults_per_job or times
    resources = {"spares": row.spares} | ({"image": COLD_IMAGE} if row.is_cold else {})
    for _ in range(times // faults_per_job):
        harness.spread_operator()
        with harness.run_job(resources=resources) as target:
            if row.spares:
                target.await_result(lambda: len(target.find_gang_pods()) == 2 + row.spares, "the spare")
            target.await_risk(row.checkpoints * EVERY, STEPS_AT_RISK)
            for _ in range(faults_per_job):
                found = _recovery(harness, row, target)
                say(f"{row.name:55} {_recovery_text(found)}")
                yield found
                target.await_risk(found.first_after.step + EVERY, STEPS_AT_RISK)
            harness.assert_unharmed(target)


def _recovery(harness: FaultHarness, row: Row, target: TargetJob) -> Recovery:
    with _without_network(harness, row, target):
        found = measure_recovery(target, lambda pods: row.fault(harness, target, pods))
    harness.await_operator()
    return found


@contextmanager
def _without_network(harness: FaultHarness, row: Row, target: TargetJob) -> Iterator[None]:
    if row.cuts is None:
        yield
        return
    with harness.without_network(target.find_gang_pods()[row.cuts].node):
        yield


def _recovery_text(found: Recovery) -> str:
    parts = " ".join(f"{part} {getattr(found.split, part):.2f}" for part in PARTS)
    return f"{found.seconds:6.2f} s = {parts}, {found.lost_steps} steps again, pods {sorted(found.new_pods)} new"


def _results(row: Row, found: Sequence[Recovery]) -> list[Result]:
    def result(what: str, value: float, unit: str = "s", target: float | None = None) -> Result:
        return Result(BENCH, f"{row.name} | {what}", value, unit, Better.LOWER, target)

    return [
        result("p50", median([one.seconds for one in found])),
        result("p95", quantile([one.seconds for one in found], 0.95), target=row.target_seconds),
        *(result(part, median([getattr(one.split, part) for one in found])) for part in PARTS),
        result("steps done again, most", max(one.lost_steps for one in found), ""),
        result("of steps at risk, most", max(one.steps_at_risk for one in found), ""),
        result("pods replaced", max(len(one.new_pods) for one in found), ""),
    ]


def table(results: Sequence[Result], around: Mapping[str, str]) -> str:
    """A row for each fault, a column for each part."""
    rows: dict[str, dict[str, Result]] = {}
    for result in results:
        row, _, what = result.case.partition(" | ")
        rows.setdefault(row, {})[what] = result
    columns = list(dict.fromkeys(what for of in rows.values() for what in of))
    lines = [f"| fault | {' | '.join(columns)} | target | met |", f"|---{'|---:' * (len(columns) + 1)}|---|"]
    for row, mine in rows.items():
        target, met = mine["p95"].target, mine["p95"].meets_target
        shown = [f"{mine[what].value:.3g}" for what in columns]
        ending = "| " if target is None else f"{target:g} | {'yes' if met else '**no**'}"
        lines.append(f"| {row} | {' | '.join(shown)} | {ending} |")
    return "\n".join([*lines, "", measured_on(around)])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="how often each fault is done")
    parser.add_argument("--only", help="only faults with this in their name; nothing is recorded")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
