"""One measured number as one JSON line, and the pages that are made from those lines."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
# Between these marks a page belongs to the benchmark; what people write around them is kept.
START, END = "<!-- measured: start -->", "<!-- measured: end -->"


class Better(StrEnum):
    """The direction that is better."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True)
class Result:
    """One measured number, beside a peer's when there is one that ran in the same run."""

    bench: str
    case: str
    value: float
    unit: str
    better: Better
    target: float | None = None
    peer: str | None = None
    peer_value: float | None = None
    # The least and the most of several runs, of which the value is the median.
    spread: tuple[float, float] | None = None
    peer_spread: tuple[float, float] | None = None

    @property
    def meets_target(self) -> bool | None:
        """Return whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.better is Better.LOWER else self.value >= self.target


Tabled = Callable[[Sequence["Result"], Mapping[str, str]], str]


def record(
    results: Sequence[Result], packages: Iterable[str], conditions: str = "", tabled: Tabled | None = None
) -> None:
    """Append the results, measured on this machine, and write the page of their benchmark again.

    `conditions` say what else was as it was, `tabled` makes a table other than the usual one.
    """
    keep(results, {"machine": machine(), "stack": ", ".join(filter(None, (stack(packages), conditions)))}, tabled)


def keep(results: Sequence[Result], where: Mapping[str, str], tabled: Tabled | None = None) -> None:
    """The same for results that were measured elsewhere: `where` names that machine and its stack."""
    bench = results[0].bench
    around = {**where, "commit": commit()}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{bench}.jsonl").open("a") as lines:
        for result in results:
            lines.write(json.dumps(_fields(result) | around) + "\n")
    write_page(bench, (tabled or table)(results, around))


def _fields(result: Result) -> dict[str, object]:
    fields = asdict(result)
    spreads = {"spread": fields.pop("spread"), "peerSpread": fields.pop("peer_spread")}
    fields["peerValue"] = fields.pop("peer_value")
    return fields | {name: spread for name, spread in spreads.items() if spread is not None}


def write_page(bench: str, measured: str) -> None:
    """Put the table of the newest run between the marks of the benchmark's page."""
    page = FOLDER / f"{bench}.md"
    before, _, rest = page.read_text().partition(START)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{START}\n{measured}\n{END}{after}")


def table(results: Sequence[Result], around: Mapping[str, str]) -> str:
    """The results as Markdown, a row for each case and a column for each peer, with how many times ours it takes."""
    peers = list(dict.fromkeys(r.peer for r in results if r.peer is not None))
    columns = ["case", "measured", *peers, "target", "met"]
    rows = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 2)}|---|"]
    rows += [_row([r for r in results if r.case == case], peers) for case in dict.fromkeys(r.case for r in results)]
    return "\n".join([*rows, "", measured_on(around)])


def measured_on(around: Mapping[str, str]) -> str:
    """Return where and with what."""
    return f"Measured on {around['machine']}, {around['stack']}, commit {around['commit']}."


def _row(results: Sequence[Result], peers: Iterable[str]) -> str:
    """One case: ours, and each peer that was measured."""
    ours = results[0]
    beside = {r.peer: r for r in results}
    mine = f"{four_digits(ours.value)} {ours.unit}".strip() + _range(ours.spread)
    cells = [ours.case, mine, *(_beside(ours, beside.get(peer)) for peer in peers)]
    words = {None: "", True: "yes", False: "**no**"}
    target = "" if ours.target is None else f"{four_digits(ours.target)} {ours.unit}"
    return f"| {' | '.join(map(str.strip, [*cells, target, words[ours.meets_target]]))} |"


def _beside(ours: Result, theirs: Result | None) -> str:
    if theirs is None or theirs.peer_value is None:
        return ""
    times = f" ({theirs.peer_value / ours.value:.2g}x)" if ours.value else ""
    return f"{four_digits(theirs.peer_value)} {ours.unit}".strip() + times + _range(theirs.peer_spread)


def _range(spread: tuple[float, float] | None) -> str:
    return "" if spread is None else f", {four_digits(spread[0])} to {four_digits(spread[1])}"


def four_digits(value: float) -> str:
    """Four digits, never as a power."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def machine() -> str:
    """Processor and cores, without a name."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    cores = sum(1 for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("processor"))
    return f"{cores} cores of {model}"


def stack(packages: Iterable[str]) -> str:
    """Versions of Python and of the packages that matter to the benchmark."""
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in packages)])


def commit() -> str:
    """The commit that was measured, marked when the tree differed from it."""
    command = ["git", "describe", "--always", "--dirty"]
    described = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    return described.stdout.strip() or "unknown"
