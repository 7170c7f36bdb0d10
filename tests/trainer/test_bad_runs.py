"""Runs with bad input or a bad volume: one line with the place and the fix, and nothing lost."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from model_configs import config as small_config
from moejob_api.contract.pods import ExitCode
from moejob_api.models.shape import Family
from moejob_trainer.checkpoints import GoodCheckpoint, find_latest_checkpoint
from moejob_trainer.checkpoints.verification import verify_checkpoint
from moejob_trainer.data import tiny
from trainer.runs import Runs
from trainer.training_data import make_chat, write_jsonl

Sections = Mapping[str, Any]
# Makes the bad thing, in the volume that holds a run with two good checkpoints; returns the sections that name it.
Make = Callable[[Path], Sections]


@dataclass(frozen=True)
class Bad:
    """A bad start of the run, and what is said of it in the last line."""

    make: Make
    says: str
    settings: Mapping[str, Any] | None = None


def _data(*records: Mapping[str, Any] | str, **data: Any) -> Make:
    def make(volume: Path) -> Sections:
        path = write_jsonl(volume / "train.jsonl", *records)
        return {"data": {"train": [{"source": str(path), "format": "Chat"}], **data}}

    return make


def _model(source: str) -> Make:
    return lambda volume: {"model": {"source": source.replace("VOLUME", str(volume))}}


def _published(spoil: Callable[[Path], None]) -> Make:
    """A model of another family as one would download it, then spoilt."""

    def make(volume: Path) -> Sections:
        folder = volume / "published"
        settings = small_config(Family.QWEN3_MOE, vocab_size=512, initializer_range=0.1)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(folder)
        tiny.build_tokenizer().save_pretrained(folder)
        spoil(folder)
        return {"model": {"source": str(folder)}}

    return make


def _without_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def _cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _garbled(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:24] = b"not JSON at all!"
    path.write_bytes(content)


def _unheard(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "unheard"}))


def _sections(**sections: Any) -> Make:
    return lambda _: sections


def _read_only(volume: Path) -> Sections:
    for path in (volume / "job", volume / "job" / "checkpoints"):
        path.chmod(0o555)
    return {}


GOOD = make_chat("what colour is grass", "green")
CASES: Mapping[str, Bad] = {
    "broken JSON line": Bad(
        _data(GOOD, GOOD, '{"messages": ['), r"train\.jsonl, line 3 is not JSON: .*whole JSON object"
    ),
    "line that is no object": Bad(_data(GOOD, "[1, 2]"), r"train\.jsonl, line 2 holds a JSON list"),
    "missing fields": Bad(_data(GOOD, {"text": "hello"}), r"train\.jsonl, line 2: there is no messages; found text"),
    "wrong role": Bad(
        _data({"messages": [{"role": "wizard", "content": "hi"}]}),
        r"train\.jsonl, line 1, message 1 has the role \"wizard\"; expected one of .*user",
    ),
    "over-long and refused": Bad(
        _data(GOOD, make_chat("a" * 200, "b"), overlong="Refuse"),
        r"line 2 has \d+ tokens, data\.maxLength is 64 .*Truncate",
    ),
    "over-long and all dropped": Bad(
        _data(make_chat("a" * 200, "b")), r"none of the 1 records .*1 dropped.*raise maxLength"
    ),
    "empty data": Bad(_data(), r"train\.jsonl \(split train\) is empty"),
    "no such data": Bad(
        _sections(data={"train": [{"source": "/nowhere/a.jsonl", "format": "Chat"}]}),
        r"no file or folder /nowhere/a\.jsonl",
    ),
    "other data than before": Bad(_data(GOOD), r"the data, .* changed since the checkpoint.*resumeFrom"),
    "no such folder of a model": Bad(
        _model("VOLUME/none"), r"there is no folder .*/none, which spec\.model\.source names"
    ),
    "model that the hub does not have": Bad(_model("nobody/nothing"), r"nobody/nothing cannot be had from the .*hub"),
    "model of an unknown kind": Bad(_published(_unheard), r"unheard"),
    "model without a tokenizer": Bad(
        _published(_without_tokenizer), r"no tokenizer can be read from .*tokenizer\.json"
    ),
    "weights that are cut off": Bad(
        _published(_cut_off), r"model\.safetensors is cut off or not a safetensors file", settings={"job": "fresh"}
    ),
    "weights that are garbled": Bad(
        _published(_garbled), r"model\.safetensors is cut off or not a safetensors file", settings={"job": "fresh"}
    ),
    "checkpoint of another model": Bad(_published(lambda _: None), r"another model"),
    "folder of another run": Bad(_sections(), r"belongs to job job \(uid uid-job\)", settings={"uid": "another"}),
    "nothing to resume from": Bad(
        _sections(checkpoint={"resumeFrom": "nobody"}),
        r"checkpoint\.resumeFrom nobody names",
        settings={"job": "fresh"},
    ),
    "resumed from another model": Bad(
        lambda volume: {**_published(lambda _: None)(volume), "checkpoint": {"resumeFrom": "job"}},
        r"another model",
        settings={"job": "fresh"},
    ),
    "read-only folder": Bad(
        _read_only, r"Permission denied; make the folder writable", settings={"before": "no superuser"}
    ),
    "full disk": Bad(
        _sections(training={"maxSteps": 4}), r"File too large; the volume is full", settings={"before": "small files"}
    ),
}


@pytest.fixture(scope="module")
def volume() -> Iterator[Path]:
    """Not below pytest's own folder, which none but its owner may enter."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "volume"
        folder.mkdir()
        for path in (folder.parent, folder):
            path.chmod(0o755)
        yield folder


@pytest.fixture(scope="module")
def good(volume: Path) -> Iterator[Runs]:
    """A run of two steps, both saved."""
    runs = Runs(volume)
    runs.run_to_end(training={"maxSteps": 2})
    yield runs
    runs.close()


@pytest.fixture
def another(good: Runs, volume: Path) -> Iterator[Runs]:
    """A copy of it."""
    folder = volume.with_name("copy")
    shutil.copytree(good.volume, folder)
    runs = Runs(folder)
    yield runs
    runs.close()
    shutil.rmtree(folder)
    shutil.rmtree(folder.with_name("copy-outside"), ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_bad_run_says_why_in_one_line_and_loses_nothing(another: Runs, name: str) -> None:
    bad = CASES[name]
    sections = bad.make(another.volume)
    started = another.start(**{"attempt": 2, **(bad.settings or {}), **sections})
    assert started.await_exit_codes() == [ExitCode.BAD_CONFIGURATION], started.read_log()
    assert re.search(bad.says, started.last_line()), started.read_log()
    kept = verify_checkpoint(another.volume / "job" / "checkpoints" / "step-2.1.0")
    assert isinstance(kept, GoodCheckpoint), kept


@pytest.mark.slow
def test_a_run_that_diverges_says_so_and_saves_nothing_of_it(another: Runs) -> None:
    # Decay by more than all there is turns every weight around, larger.
    optimizer = {"learningRate": 10.0, "weightDecay": 1.0}
    training = {"maxSteps": 200, "optimizer": optimizer}
    started = another.start(attempt=2, training=training, checkpoint={"async": False})
    assert started.await_exit_codes() == [1], started.read_log()
    said = r"Diverged: loss .* not finite in 3 updates in a row; lower training\.optimizer\.learningRate"
    assert re.search(said, started.last_line()), started.read_log()
    lines = [json.loads(line) for line in (started.folder / "steps.jsonl").read_text().splitlines()]
    assert [line["applied"] for line in lines][-3:] == [True, False, False]
    found = find_latest_checkpoint(started.folder / "checkpoints").checkpoint
    assert found is not None
    assert found.folder.step == lines[-3]["step"]
