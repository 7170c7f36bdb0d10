"""A run uses the commits of the hub that it began with: weights, data and code, whatever branches point to later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from moejob_api.job.status import HubCommit, RepositoryKind
from moejob_trainer.checkpoints.run import folder_of_run
from moejob_trainer.data import tiny
from moejob_trainer.data.hub import HubPins, PinnedRepository, is_lasting, require_own_code
from moejob_trainer.errors import BadConfiguration
from trainer.hub import Files, Hub, read_files, serve_hub
from trainer.runs import Runs, read_steps

MODEL, CHATS = "team/tiny", "team/chats"
JOB: dict[str, Any] = {
    "model": {"source": MODEL, "trustRemoteCode": True},
    "data": {"train": [{"source": CHATS, "format": "Chat"}]},
}
CODE = """
import os
from transformers import PreTrainedTokenizerFast

with open(os.environ["HF_HOME"] + "/ran", "a") as ran:
    ran.write("{name}\\n")


class Marked(PreTrainedTokenizerFast):
    pass
"""


def write_model(folder: Path, name: str) -> Files:
    """A small model with random weights, whose tokenizer is code of its own that leaves a name."""
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=512, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32, intermediate_size=32,
    )  # fmt: skip
    torch.manual_seed(len(name))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    about = json.loads(settings.read_text()) | {"auto_map": {"AutoTokenizer": [None, "marked.Marked"]}}
    settings.write_text(json.dumps(about | {"tokenizer_class": "Marked"}))
    (folder / "marked.py").write_text(CODE.format(name=name))
    return read_files(folder)


def chats(word: str) -> Files:
    """Data that differs by a word."""
    said = [{"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": word * 2}]}] * 8
    return {"train.jsonl": "".join(f"{json.dumps(chat)}\n" for chat in said).encode()}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as found:
        yield found


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    found = Runs(tmp_path / "volume", "spawn")
    yield found
    found.close()


def started(hub: Hub, runs: Runs, attempt: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], set[str]]:
    """Run an attempt to its end on a machine that has kept nothing. Returns what code ran, and which data was read."""
    home = runs.volume.parent / f"home-{attempt}"
    home.mkdir()
    for name, value in hub.environ(home).items():
        monkeypatch.setenv(name, value)
    runs.run_to_end(attempt=attempt, training={"maxSteps": attempt}, **JOB)
    corpora = (runs.volume / "job/data").iterdir()
    read = {json.dumps(sorted(hash(path.read_bytes()) for path in corpus.iterdir())) for corpus in corpora}
    return sorted(set((home / "ran").read_text().split())), read


def test_a_restart_uses_the_weights_data_and_code_that_the_run_began_with(
    hub: Hub, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {hub.model(MODEL).push(write_model(tmp_path / "first", "first")), hub.dataset(CHATS).push(chats("a"))}
    code, read = started(hub, runs, 1, monkeypatch)
    assert code == ["first"]
    second = {hub.model(MODEL).push(write_model(tmp_path / "second", "second")), hub.dataset(CHATS).push(chats("b"))}
    # Read again, and not taken from what the first start has prepared.
    shutil.rmtree(tmp_path / "volume/job/data")
    hub.asked.clear()
    assert started(hub, runs, 2, monkeypatch) == (["first"], read)
    asked = " ".join(hub.asked)
    assert any(commit in asked for commit in first)
    assert not any(commit in asked for commit in second)
    pinned = json.loads((tmp_path / "volume/job/hub.json").read_text())["repositories"]
    assert {pin["commit"] for pin in pinned} == first
    assert [step.step for step in read_steps(tmp_path / "volume/job")] == [1, 2]
    # A model that is gone from the hub is on the volume still.
    hub.repositories.clear()
    assert started(hub, runs, 3, monkeypatch)[0] == ["first"]


@pytest.mark.thorough
def test_a_run_that_continues_another_uses_its_weights_data_and_code(
    hub: Hub, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {hub.model(MODEL).push(write_model(tmp_path / "first", "first")), hub.dataset(CHATS).push(chats("a"))}
    started(hub, runs, 1, monkeypatch)
    second = {hub.model(MODEL).push(write_model(tmp_path / "second", "second")), hub.dataset(CHATS).push(chats("b"))}
    hub.asked.clear()
    going_on = {"resumeFrom": "job", "resume": "Run"}
    reported = runs.run_to_end("next", training={"maxSteps": 2}, checkpoint=going_on, **JOB).board.read_run()
    assert (tmp_path / "home-1/ran").read_text().split().count("second") == 0
    assert not any(commit in " ".join(hub.asked) for commit in second)
    pinned = json.loads((tmp_path / "volume/next/hub.json").read_text())["repositories"]
    assert {pin["commit"] for pin in pinned} == first
    # For the status of the job.
    assert reported is not None
    assert {commit.commit for commit in reported.hub_commits or ()} == first
    assert [step.step for step in read_steps(tmp_path / "volume/next")] == [2]


@pytest.mark.parametrize("named", ["a", "a/checkpoints", "a/checkpoints/step-2.1.0"])
def test_the_run_of_whatever_may_be_named_is_found(named: str) -> None:
    assert folder_of_run(Path("/volume") / named) == Path("/volume/a")


def pin(name: str, commit: str, revision: str | None = None) -> PinnedRepository:
    return PinnedRepository(kind=RepositoryKind.MODEL, name=name, revision=revision, commit=commit * 40)


def test_a_pin_is_for_one_name_of_one_kind_in_one_revision(tmp_path: Path) -> None:
    pins = HubPins(tmp_path)
    pins.record_pin(pin("team/a", "1"))
    pins.record_pin(pin("team/a", "2", "v2"))
    again = HubPins(tmp_path)
    assert again.find_pin(RepositoryKind.MODEL, "team/a") == pin("team/a", "1")
    assert again.find_pin(RepositoryKind.MODEL, "team/a", "v2") == pin("team/a", "2", "v2")
    assert again.find_pin(RepositoryKind.MODEL, "team/b") is None
    assert again.find_pin(RepositoryKind.DATASET, "team/a") is None
    assert again.list_commits() == tuple(
        HubCommit(kind=RepositoryKind.MODEL, name="team/a", commit=commit * 40) for commit in ("1", "2")
    )


def test_a_run_that_uses_nothing_of_the_hub_has_no_commits(tmp_path: Path) -> None:
    assert HubPins(tmp_path).list_commits() is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"repositories": [{"name": "a"}]}', b'{"pins": []}'], ids=repr)
def test_pins_that_cannot_be_read_end_the_run_and_are_never_taken_for_none(tmp_path: Path, content: bytes) -> None:
    pins = HubPins(tmp_path)
    pins.file.write_bytes(content)
    with pytest.raises(BadConfiguration, match=r"hub\.json does not say which commits"):
        pins.find_pin(RepositoryKind.MODEL, "team/a")


@pytest.mark.parametrize(
    ("auto_map", "is_own"),
    [
        pytest.param({"AutoTokenizer": [None, "marked.Marked"], "AutoConfig": "config.C"}, True, id="beside the model"),
        pytest.param({"AutoTokenizer": ["other/repo--marked.Slow", None]}, False, id="a tokenizer elsewhere"),
        pytest.param({"AutoConfig": "other/repo--config.C"}, False, id="a configuration elsewhere"),
    ],
)
def test_code_of_another_repository_is_refused_for_no_commit_of_the_model_fixes_it(
    tmp_path: Path, auto_map: dict[str, Any], is_own: bool
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "tokenizer.json").write_text("[]")
    if is_own:
        require_own_code(tmp_path)
        return
    with pytest.raises(BadConfiguration, match="from another repository, other/repo--"):
        require_own_code(tmp_path)


PINNED = PinnedRepository(kind=RepositoryKind.MODEL, name=MODEL, commit="a" * 40)


def answered(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("refused", response=httpx.Response(status, request=httpx.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    ("error", "known", "expected"),
    [
        pytest.param(answered(404), PINNED, True, id="a commit that is gone"),
        pytest.param(answered(403), PINNED, True, id="a token that may not read it any more"),
        pytest.param(answered(503), PINNED, False, id="a hub that is busy"),
        pytest.param(answered(503), None, False, id="a hub that is busy when the run first asks"),
        pytest.param(httpx.ConnectError("no route"), PINNED, False, id="a hub that was reached and is away"),
        pytest.param(httpx.ConnectError("no route"), None, True, id="a hub that was never reached"),
        pytest.param(HFValidationError("a name"), PINNED, True, id="a name that is none"),
    ],
)
def test_only_what_the_hub_would_refuse_again_ends_a_run(
    error: Exception, known: PinnedRepository | None, expected: bool
) -> None:
    assert is_lasting(error, known) is expected
