"""The page of features claims what its tests have seen, no more and no less, as the code of each test shows."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path

import pytest

from evidence import WITHOUT_WEIGHTS, NoTestError, Weights, reached_words, read_evidence

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([A-F])(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]*) ?\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[^`]+)`")
BENCHMARK = re.compile(r"\b(benchmarks/[\w-]+\.md)\b")


class State(StrEnum):
    """A state of the page."""

    WORKS = "works"
    ON_RANDOM_WEIGHTS = "on random weights"
    OTHERWISE = "otherwise"
    OTHERWISE_ON_RANDOM_WEIGHTS = "otherwise, on random weights"
    PLANNED_ONLY = "planned only"
    REFUSED = "refused"
    NOT_YET = "not yet"
    NOT_OURS = "not ours"


# States that a reader would have to take on trust, were there no test.
UNPROVEN = {State.NOT_YET, State.NOT_OURS}
# What a claim of each state needs of the weights that were seen; others claim nothing of weights.
ON_RANDOM = {State.ON_RANDOM_WEIGHTS, State.OTHERWISE_ON_RANDOM_WEIGHTS}
SEEN = {State.WORKS, State.OTHERWISE} | ON_RANDOM
# Names in the first column, and how code writes them. A test that never comes to such a word proves nothing about it.
TECHNOLOGIES = {
    "NCCL": "nccl",
    "IPC": "ipc",
    "Gloo": "gloo",
    "FSDP": "fsdp",
    "ZeRO-2": "zero2",
    "LoRA": "lora",
    "PEFT": "peft",
    "FP8": "fp8|float8",
    "W&B": "wandb",
    "TensorBoard": "tensorboard",
    "MLflow": "mlflow",
    "Prometheus": "prometheus",
    "Llama 4": "llama4",
}
# Where they run, a GPU is: on a CPU there is a stand-in for them at most.
ON_GPUS_ONLY = ("NCCL", "IPC", "CUDA")


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    section: str
    number: int
    feature: str
    state: str
    proof: str

    @cached_property
    def tests(self) -> list[str]:
        return TEST.findall(self.proof)

    @cached_property
    def benchmarks(self) -> list[str]:
        return BENCHMARK.findall(self.proof)

    def is_seen_with(self, weights: Weights) -> bool:
        """Return whether a test that is named, or a page of measurements, has seen the feature with such weights."""
        seen = {read_evidence(test).weights for test in self.tests}
        return weights in seen | {measured_weights(page) for page in self.benchmarks}


def measured_weights(page: str) -> Weights:
    """Return the weights that a page of measurements was made with: none while nothing stands in its tables."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if (
        text.count("<!-- measured: start -->")
        and "|" not in text.partition("<!-- measured: start -->")[2].partition("<!--")[0]
    ):
        return Weights.NONE
    return Weights.REAL if "those of `make real-models`" in text else Weights.RANDOM


def all_rows(page: str) -> list[Row]:
    return [
        Row(section, int(number), *(cell.strip() for cell in cells)) for section, number, *cells in ROW.findall(page)
    ]


ROWS = all_rows(PAGE)


def problems(row: Row) -> list[str]:
    """Return what a row claims and nothing proves."""
    if row.state not in list(State):
        return [f"{row.state!r} is no state; the page explains {', '.join(State)}"]
    missing = _missing(row)
    return missing or _problems_of_state(row, State(row.state)) or _problems_of_names(row)


def _missing(row: Row) -> list[str]:
    found = [f"there is no {page}" for page in row.benchmarks if not (ROOT / page).is_file()]
    for test in row.tests:
        try:
            read_evidence(test)
        except NoTestError as error:
            found.append(str(error))
    return found


def _problems_of_state(row: Row, state: State) -> list[str]:
    if not row.proof:
        return ["there is no proof and no reason"]
    if state not in UNPROVEN and not row.tests:
        return [f"{state} is a claim; name the tests that prove it"]
    if state is State.PLANNED_ONLY and not all(test.startswith("tests/api/") for test in row.tests):
        return ["something ran: say on which weights"]
    if state not in SEEN:
        return []
    is_real = row.is_seen_with(Weights.REAL)
    if state in ON_RANDOM:
        return (
            ["real weights were seen: say so"]
            if is_real
            else []
            if row.is_seen_with(Weights.RANDOM)
            else ["no weights"]
        )
    return [] if is_real or not row.is_seen_with(Weights.RANDOM) else ["no test that is named has real weights"]


def _problems_of_names(row: Row) -> list[str]:
    if row.state not in SEEN:
        return []
    words = " ".join(word for test in row.tests for word in (test, *reached_words(test))).lower()
    pages = " ".join((ROOT / page).read_text(encoding="utf-8") for page in row.benchmarks)
    return [
        f"no test that is named comes to {name}"
        for name, pattern in TECHNOLOGIES.items()
        if name in row.feature and not re.search(pattern, words) and name not in pages
    ] + [
        f"no test that is named runs {name} on a GPU"
        for name in ON_GPUS_ONLY
        if name in row.feature and name not in pages and not any(read_evidence(test).needs_gpu for test in row.tests)
    ]


def test_every_line_of_a_table_is_a_row_and_no_number_is_left_out() -> None:
    lines = re.findall(r"^\| [A-F]\d+ ", PAGE, re.MULTILINE)
    assert len(lines) == len(ROWS) > 130
    for section in "ABCDEF":
        numbers = [row.number for row in ROWS if row.section == section]
        assert numbers == list(range(1, len(numbers) + 1))


def test_every_state_is_explained() -> None:
    explained = set(re.findall(r"^- \*\*([^*]+)\*\*:", PAGE, re.MULTILINE))
    assert {state.partition(",")[0] for state in State} == explained


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.section}{row.number}")
def test_a_row_claims_what_its_tests_have_seen(row: Row) -> None:
    assert problems(row) == []


def test_a_page_of_measurements_has_the_weights_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "page.md").write_text(
        "Models are those of `make real-models`.\n<!-- measured: start -->\nNothing\n<!-- m -->|"
    )
    assert measured_weights("page.md") is Weights.NONE
    (tmp_path / "page.md").write_text(
        "Models are those of `make real-models`.\n<!-- measured: start -->\n| 1 |\n<!-- m -->"
    )
    assert measured_weights("page.md") is Weights.REAL
    (tmp_path / "page.md").write_text("| 1 |")
    assert measured_weights("page.md") is Weights.RANDOM


def test_what_needs_no_weights_is_there() -> None:
    assert [place for place in WITHOUT_WEIGHTS if not (ROOT / place).exists()] == []


REAL_TEST = "tests/trainer/test_real_models.py::test_a_real_model_knows_the_capital_of_italy"
RANDOM_TEST = "tests/trainer/parity/test_fsdp.py::test_a_layout_of_shares_trains_what_transformers_trains"
PLAN_TEST = "tests/api/test_examples.py::test_an_example_to_copy_is_accepted"


@pytest.mark.parametrize(
    ("feature", "state", "proof", "problem"),
    [
        pytest.param("FSDP", "works", f"`{RANDOM_TEST}`", "real weights", id="random weights are no real ones"),
        pytest.param("FSDP", "otherwise", f"`{RANDOM_TEST}`", "real weights", id="in another form neither"),
        pytest.param("A plan", "planned only", f"`{RANDOM_TEST}`", "something ran", id="what ran was not only planned"),
        pytest.param("A plan", "on random weights", f"`{PLAN_TEST}`", "no weights", id="a plan has no weights"),
        pytest.param("FSDP", "works", f"`{PLAN_TEST}`", "comes to FSDP", id="a test of something else"),
        pytest.param("FSDP by NCCL", "on random weights", f"`{RANDOM_TEST}`", "NCCL", id="a transport that none runs"),
        pytest.param(
            "IPC",
            "on random weights",
            "`tests/trainer/rollouts/transports/test_buckets.py::test_engines_open_buckets_by_their_handles`",
            "on a GPU",
            id="a stand-in for a GPU",
        ),
        pytest.param(
            "FSDP",
            "on random weights",
            "`tests/trainer/parity/test_fsdp.py::test_gone`",
            "has no test",
            id="a test that is gone",
        ),
        pytest.param(
            "FSDP", "on random weights", "`tests/trainer/parity/test_fsdp.py`", "has no test", id="a file alone"
        ),
        pytest.param(
            "FSDP",
            "on random weights",
            "`tests/trainer/parity/cells.py::test_x`",
            "pytest collects",
            id="a file that holds no tests",
        ),
        pytest.param("FSDP", "works", "everywhere", "name the tests", id="no test"),
        pytest.param("FSDP", "perhaps", f"`{RANDOM_TEST}`", "no state", id="no state"),
        pytest.param(
            "Speed", "on random weights", f"`{RANDOM_TEST}`, `benchmarks/gone.md`", "gone.md", id="a page that is gone"
        ),
    ],
)
def test_a_claim_without_proof_is_seen(feature: str, state: str, proof: str, problem: str) -> None:
    assert problem in "\n".join(problems(Row("A", 1, feature, state, proof)))


def test_real_weights_are_seen_wherever_a_test_gets_them_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a module, a fixture of its folder, a helper of another module, or from the folder in the cache."""
    (tmp_path / "tests" / "gpu").mkdir(parents=True)
    (tmp_path / "tests" / "gpu" / "conftest.py").write_text(
        "from real_models import find_real_model\n\n@fixture\ndef smol():\n    return find_real_model('smol')\n"
    )
    (tmp_path / "tests" / "gpu" / "test_kinds.py").write_text(
        "import pytest\nimport real_models\n\nFOLDER = cache() / 'real-models'\n\n"
        "def _folder():\n    return FOLDER / 'smol'\n\n"
        "def test_by_fixture(smol): pass\n\ndef test_by_folder():\n    assert _folder()\n\n"
        "def test_by_module():\n    real_models.find_real_model('smol')\n\n"
        "from gpu.jobs import smol_job\n\ndef test_by_helper():\n    smol_job()\n\n"
        "def test_by_nothing(tmp_path): pass\n\n"
        "@pytest.mark.skip\ndef test_that_is_skipped(): pass\n"
    )
    (tmp_path / "tests" / "gpu" / "jobs.py").write_text(
        "from real_models import find_real_model\n\ndef smol_job():\n    return find_real_model('smol')\n"
    )
    monkeypatch.setattr("evidence.ROOT", tmp_path)
    path = "tests/gpu/test_kinds.py"
    kinds = {
        name: read_evidence(f"{path}::test_by_{name}").weights
        for name in ("fixture", "folder", "module", "helper", "nothing")
    }
    assert kinds == {"fixture": "real", "folder": "real", "module": "real", "helper": "real", "nothing": "random"}
    with pytest.raises(NoTestError, match="always skipped"):
        read_evidence(f"{path}::test_that_is_skipped")
