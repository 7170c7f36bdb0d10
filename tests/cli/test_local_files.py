"""Files that a job names are looked for before anything starts, on the machine that would read them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from builders import spec
from moejob_api.planner.memory import VolumeNeed
from moejob_cli.app import app
from moejob_cli.local_files import unreadable_sources
from moejob_cli.running.machine import CannotRun, require_room, require_sources

GIB = 1024**3
PROMPTS = [{"source": "moejob/tiny-sums", "format": "Prompts"}]


def _data(*sources: str) -> list[dict[str, str]]:
    return [{"source": source, "format": "Text"} for source in sources]


def _write_model(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_files_and_folders_that_are_there_are_accepted(tmp_path: Path) -> None:
    _write_model(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}")
    wanted = spec(
        model={"source": str(tmp_path)},
        data={"train": _data(str(tmp_path / "a.jsonl"), str(tmp_path), "org/name"), "eval": _data("moejob/tiny-chats")},
    )
    require_sources(wanted)


def test_each_source_that_is_not_here_is_named_with_its_field(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    wanted = spec(
        model={"source": str(tmp_path)},
        data={"train": _data("/none/a.jsonl", "pvc://claim/a.jsonl"), "eval": _data(str(loop))},
    )
    with pytest.raises(CannotRun) as refused:
        require_sources(wanted)
    claim, model, train, held_out = str(refused.value).split("; spec.")
    absent = "cannot be read on this machine (No such file or directory); correct the path, or put it there"
    assert (
        claim == "spec.data.train[1].source: pvc://claim/a.jsonl is a claim of a cluster; on this machine, name a path"
    )
    assert model == f"model.source: {tmp_path}/config.json {absent}"
    assert train == f"data.train[0].source: /none/a.jsonl {absent}"
    assert f"data.eval[0].source: {loop} cannot be read on this machine (Too many levels" in held_out


def test_a_checkpoint_of_megatron_needs_its_config_elsewhere(tmp_path: Path) -> None:
    model = {"source": str(tmp_path), "config": str(tmp_path / "published")}
    (problem,) = unreadable_sources(spec(model=model, data={"train": _data("moejob/tiny-chats")}))
    assert problem.startswith(f"spec.model.config: {tmp_path}/published/config.json cannot be read")


def test_what_a_folder_of_a_model_lacks_is_named(tmp_path: Path) -> None:
    folder = _write_model(tmp_path / "model")
    wanted = spec(model={"source": str(folder)}, data={"train": _data("moejob/tiny-chats")})
    assert [*unreadable_sources(wanted)] == []
    (folder / "tokenizer.json").rename(folder / "elsewhere")
    assert [*unreadable_sources(wanted)] == [
        f"spec.model.source: {folder} has no tokenizer; put tokenizer.json and tokenizer_config.json of the model there"
    ]
    # Kimi-K2's.
    (folder / "elsewhere").rename(folder / "tiktoken.model")
    (folder / "model.safetensors").unlink()
    (problem,) = unreadable_sources(wanted)
    assert "has no weights: neither model.safetensors nor model.safetensors.index.json" in problem
    parts = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    (folder / "model-1.safetensors").touch()
    (problem,) = unreadable_sources(wanted)
    assert f"{folder} lacks model-2.safetensors, which model.safetensors.index.json names" in problem
    (folder / "model-2.safetensors").touch()
    assert [*unreadable_sources(wanted)] == []
    index.write_text("[]")
    (problem,) = unreadable_sources(wanted)
    assert f"{index} cannot be read (" in problem
    (folder / "latest_checkpointed_iteration.txt").touch()
    assert [*unreadable_sources(wanted)] == []


def test_data_that_holds_no_records_is_named(tmp_path: Path) -> None:
    for name in ("text.txt", "empty.jsonl", "parts/sub/a.csv.gz", "saved/dataset_info.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "none").mkdir()
    names = ("text.txt", "empty.jsonl", "none", "parts", "saved")
    wanted = spec(data={"train": _data(*(str(tmp_path / name) for name in names), "chats.jsonl")})
    text, empty, none, absent = unreadable_sources(wanted)
    kinds = ".jsonl, .jsonl.gz, .csv, .csv.gz, .parquet"
    assert text == (
        f"spec.data.train[0].source: {tmp_path}/text.txt is none of {kinds}; convert it, one JSON object a line"
    )
    assert empty == f"spec.data.train[1].source: {tmp_path}/empty.jsonl is empty; name a file with records"
    assert none == f"spec.data.train[2].source: folder {tmp_path}/none holds no file that ends in one of {kinds}"
    # No name on the hub ends like a file.
    assert absent.startswith("spec.data.train[5].source: chats.jsonl cannot be read on this machine")


def test_the_folder_of_a_reward_is_looked_for(tmp_path: Path) -> None:
    rewards = [{"name": "exact-match"}, {"module": "style:brief", "modulePath": str(tmp_path / "rewards")}]
    wanted = spec(method="GRPO", data={"train": PROMPTS}, grpo={"rewards": rewards})
    (problem,) = unreadable_sources(wanted)
    assert problem.startswith(f"spec.grpo.rewards[1].modulePath: {tmp_path}/rewards cannot be read on this machine")
    (tmp_path / "rewards").mkdir()
    assert [*unreadable_sources(wanted)] == []


def test_a_run_to_continue_from_is_looked_for_where_its_path_is_whole(tmp_path: Path) -> None:
    def problems(name: str) -> list[str]:
        return [*unreadable_sources(spec(data={"train": _data("org/name")}, checkpoint={"resumeFrom": name}))]

    (problem,) = problems(f"{tmp_path}/absent")
    assert problem.startswith(f"spec.checkpoint.resumeFrom: {tmp_path}/absent cannot be read on this machine")
    (problem,) = problems(str(tmp_path))
    assert f"{tmp_path} has no folder checkpoints; name the folder of a run" in problem
    step = tmp_path / "checkpoints" / "step-3"
    step.mkdir(parents=True)
    for folder, problem in (
        (tmp_path, f"no step in {step.parent} has a complete.json"),
        (step.parent, f"no step in {step.parent} has a complete.json"),
        (step, f"{step} has no complete.json, so its save did not end"),
    ):
        assert problem in "".join(problems(str(folder)))
    (step / "complete.json").touch()
    assert [*problems(str(tmp_path)), *problems(str(step.parent)), *problems(str(step)), *problems("another")] == []
    with pytest.raises(CannotRun, match=r"checkpoint\.resumeFrom: pvc://claim/run is a claim of a cluster"):
        require_sources(spec(checkpoint={"resumeFrom": "pvc://claim/run"}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.touch(0o000)
    (problem,) = unreadable_sources(spec(data={"train": _data(str(file))}))
    assert "may not be read by this user" in problem


@pytest.mark.parametrize("command", ["plan", "validate"])
def test_commands_say_what_a_run_here_would_miss(command: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    example = Path(__file__).parents[2] / "examples/tiny-sft.yaml"
    job.write_text(example.read_text().replace("source: moejob/tiny-chats", "source: /none/a.jsonl", 1))
    result = CliRunner().invoke(app, [command, str(job)])
    assert "data.train[0].source: /none/a.jsonl cannot be read on this machine" in result.output
    assert result.exit_code == 0


def test_a_disk_without_room_for_a_checkpoint_and_the_export_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 * GIB))
    require_room(VolumeNeed(checkpoint=4 * GIB, checkpoints=4, export=GIB, download=9 * GIB), tmp_path)
    with pytest.raises(CannotRun, match=r"checkpoint takes 4.0 GiB and the export 2.0 GiB, and .* has 5.0 GiB left"):
        require_room(VolumeNeed(checkpoint=4 * GIB, checkpoints=4, export=2 * GIB, download=0), tmp_path)
