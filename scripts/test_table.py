"""The table at the end of `make test`: a row for each target, with passed, failed and skipped tests, and its time.

Reads the files of scripts/tested. A target without files, because its environment could not be built or because it was
killed, has a row, too: a table without it would look like success.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree as ET

FIRST, SECOND, END = "first.xml", "second.xml", "end.json"


class Outcome(StrEnum):
    """The end of a test."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class TargetResult:
    """The outcomes of all tests of a target; a test that passed when it ran again alone has passed, and is named."""

    target: str
    outcomes: Mapping[str, Outcome]
    passed_alone: Sequence[str]
    status: int | None
    seconds: int

    @property
    def is_passed(self) -> bool:
        """Return whether the target ended without a failure, and reported at least one test."""
        return self.status == 0 and bool(self.outcomes)

    def count_outcome(self, outcome: Outcome) -> int:
        """Return the number of tests with this outcome."""
        return sum(each is outcome for each in self.outcomes.values())

    @property
    def verdict(self) -> str:
        """The end of the target in two words."""
        if self.status is None:
            return "DID NOT END"
        if not self.outcomes:
            return f"NO REPORT, status {self.status}"
        if not self.is_passed:
            return "FAILED" if self.count_outcome(Outcome.FAILED) else f"FAILED, status {self.status}"
        return f"passed, {len(self.passed_alone)} alone" if self.passed_alone else "passed"


def read_result(target: str, folder: Path) -> TargetResult:
    """Read the files of a target in its folder."""
    first, second = read_outcomes(folder / FIRST), read_outcomes(folder / SECOND)
    passed_alone = [test for test, outcome in second.items() if outcome is Outcome.PASSED]
    end = json.loads((folder / END).read_text()) if (folder / END).exists() else {}
    return TargetResult(target, {**first, **second}, passed_alone, end.get("status"), end.get("seconds", 0))


def read_outcomes(report: Path) -> dict[str, Outcome]:
    """Return the outcome of each test in pytest's report; no outcomes without a whole report."""
    try:
        tests = ET.parse(report).iter("testcase")  # noqa: S314 - pytest's own file
    except (FileNotFoundError, ET.ParseError):
        return {}
    outcomes: dict[str, Outcome] = {}
    for test in tests:
        name = f"{test.get('classname')}::{test.get('name')}"
        # A test whose teardown fails is in the report twice.
        if outcomes.get(name) is not Outcome.FAILED:
            outcomes[name] = _read_outcome(test)
    return outcomes


def _read_outcome(test: ET.Element) -> Outcome:
    if test.find("failure") is not None or test.find("error") is not None:
        return Outcome.FAILED
    return Outcome.SKIPPED if test.find("skipped") is not None else Outcome.PASSED


def table_lines(results: Sequence[TargetResult]) -> Iterator[str]:
    """Yield the lines of the table, and under it the tests that failed, and those that passed alone."""
    yield f"{'target':<14}{'passed':>8}{'failed':>8}{'skipped':>9}{'time':>9}"
    for result in results:
        counts = "".join(
            f"{result.count_outcome(outcome):>{width}}" for outcome, width in zip(Outcome, (8, 8, 9), strict=True)
        )
        yield f"{result.target:<14}{counts}{_time_text(result.seconds):>9}  {result.verdict}"
    for result in results:
        yield from (f"failed: {test}" for test, outcome in result.outcomes.items() if outcome is Outcome.FAILED)
        yield from (f"failed once, passed alone: {test}" for test in result.passed_alone)


def _time_text(seconds: int) -> str:
    return f"{seconds // 60}:{seconds % 60:02}"


def main(targets: Sequence[str]) -> int:
    """Print the table of targets; returns 1 unless all passed."""
    results = [read_result(target, Path(".pytest_cache", target, "table")) for target in targets]
    print("\n".join(["=== tests", *table_lines(results)]))
    return int(not all(result.is_passed for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
