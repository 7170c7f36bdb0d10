"""Runs that begin with a checkpoint of Megatron, or write one: the same training as with the model itself."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moejob_api.contract.pods import ExitCode
from trainer.interchange.hostile_pickles import poisons_paths
from trainer.random_model import write
from trainer.runs import Runs, StartedRanks, await_result, read_steps

if find_spec("megatron.bridge") is None:
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)

WRITES_MEGATRON: dict[str, Any] = {"exportHuggingFace": True, "exportMegatron": True, "async": False}
TWO_RANKS: dict[str, Any] = {"parallelism": {"expert": 2}, "resources": {"gpusPerNode": 2}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A run on two ranks that has written a checkpoint of Megatron, and further runs beside it."""
    made = Runs(tmp_path_factory.mktemp("megatron") / "volume")
    write(made.volume / "published")
    made.run_to_end(
        "writer",
        **TWO_RANKS,
        model={"source": str(made.volume / "published")},
        training={"maxSteps": 1},
        checkpoint=WRITES_MEGATRON,
    )
    yield made
    made.close()


@pytest.fixture
def bare_checkpoint(runs: Runs, tmp_path: Path) -> Path:
    """The checkpoint as Megatron itself writes one: without config.json and tokenizer."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(runs.volume / "writer/export-megatron", folder)
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".txt":
            path.unlink()
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def differing_tensors(actual: Path, expected: Path) -> list[str]:
    ours, theirs = tensors(actual), tensors(expected)
    assert ours.keys() == theirs.keys() != set()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def losses(run: StartedRanks) -> list[float]:
    return [step.loss for step in read_steps(run.folder)]


def test_a_run_from_a_checkpoint_of_megatron_learns_as_from_the_model(runs: Runs) -> None:
    writer, exporting = runs.volume / "writer", {"exportHuggingFace": True}
    from_megatron = runs.run_to_end(
        "from-megatron", **TWO_RANKS, model={"source": str(writer / "export-megatron")}, checkpoint=exporting
    )
    from_model = runs.run_to_end(
        "from-model", **TWO_RANKS, model={"source": str(writer / "export")}, checkpoint=exporting
    )
    assert losses(from_megatron) == losses(from_model)
    assert differing_tensors(from_megatron.folder / "model", writer / "export") == []
    assert differing_tensors(from_megatron.folder / "export", from_model.folder / "export") == []


@pytest.mark.thorough
def test_a_run_needs_the_checkpoint_only_for_its_first_start(runs: Runs, bare_checkpoint: Path) -> None:
    sections: dict[str, Any] = {"model": {"source": str(bare_checkpoint), "config": str(runs.volume / "published")}}
    first = runs.run_to_end("once", **sections, training={"maxSteps": 1})
    shutil.rmtree(bare_checkpoint)
    runs.run_to_end("once", attempt=2, **sections, training={"maxSteps": 2})
    assert [step.step for step in read_steps(first.folder)] == [1, 2]


@pytest.mark.thorough
def test_adapters_of_a_checkpoint_of_megatron_name_the_model_that_it_became(runs: Runs) -> None:
    source = str(runs.volume / "writer/export-megatron")
    run = runs.run_to_end(
        "adapted",
        model={"source": source},
        training={"maxSteps": 1, "lora": {"rank": 4}},
        checkpoint={"exportHuggingFace": True},
    )
    adapter_config = json.loads((run.folder / "export/adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(run.folder / "model")


def test_a_checkpoint_without_config_is_refused_with_the_field_that_names_one(
    runs: Runs, bare_checkpoint: Path
) -> None:
    assert "spec.model.config" in refusal(runs, "bare", {"source": str(bare_checkpoint)})


def test_a_config_beside_a_model_is_refused(runs: Runs) -> None:
    source = str(runs.volume / "published")
    assert "is none: it has no latest_checkpointed_iteration.txt" in refusal(
        runs, "no-checkpoint", {"source": source, "config": source}
    )


def test_the_config_of_another_model_is_refused(runs: Runs, bare_checkpoint: Path) -> None:
    model = {"source": str(bare_checkpoint), "config": "moejob/tiny-moe"}
    assert "use the config.json of the model" in refusal(runs, "other-config", model)


class _Calls:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.victim,)


def test_no_code_of_a_checkpoint_runs_in_a_job(runs: Runs, bare_checkpoint: Path, tmp_path: Path) -> None:
    victim, iteration = tmp_path / "ran", bare_checkpoint / "iter_0000000"
    content = pickle.dumps(_Calls(victim))
    (iteration / "common.pt").write_bytes(content)
    model = {"source": str(bare_checkpoint), "config": str(runs.volume / "published")}
    runs.run_to_end("poisoned-common", model=model, training={"maxSteps": 1})
    for number, index in enumerate((content, poisons_paths(str(victim)))):
        (iteration / ".metadata").write_bytes(index)
        assert "is no index of a checkpoint" in refusal(runs, f"poisoned-{number}", model)
    assert not victim.exists()


def test_a_link_out_of_a_checkpoint_is_refused(runs: Runs, bare_checkpoint: Path, tmp_path: Path) -> None:
    data = bare_checkpoint / "iter_0000000/__0_0.distcp"
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    model = {"source": str(bare_checkpoint), "config": str(runs.volume / "published")}
    assert "leads to" in refusal(runs, "linked", model)


@pytest.mark.thorough
def test_a_run_that_is_killed_while_it_writes_for_megatron_writes_it_in_the_next_attempt(runs: Runs) -> None:
    sections: dict[str, Any] = {
        "model": {"source": str(runs.volume / "published")},
        "training": {"maxSteps": 1},
        "checkpoint": WRITES_MEGATRON,
    }
    run = runs.start("killed", environ={"HF_TOKEN": "the user's"}, **sections)
    unfinished = run.folder / ".export-megatron.unfinished"
    await_result(unfinished.exists, "the export for Megatron")
    (converter,) = _converters(run.folder)
    environment = (converter / "environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=" in environment
    assert not any(line.startswith((b"HF_TOKEN=", b"MOEJOB_")) for line in environment)
    run.signal(signal.SIGKILL)
    assert [code for code in run.await_exit_codes() if code] == [-signal.SIGKILL]
    await_result(lambda: not _converters(run.folder), "the end of the conversion")
    assert not (run.folder / "export-megatron").exists()
    runs.run_to_end("killed", attempt=2, **sections)
    assert not unfinished.exists()
    again = runs.run_to_end("reader", model={"source": str(run.folder / "export-megatron")}, training={"maxSteps": 1})
    assert differing_tensors(again.folder / "model", run.folder / "export") == []


def _converters(folder: Path) -> list[Path]:
    """Return the processes that convert files of a run, by their folders below /proc."""
    return [process for process in Path("/proc").glob("[0-9]*") if _is_converter(process, folder)]


def _is_converter(process: Path, folder: Path) -> bool:
    try:
        command = (process / "cmdline").read_bytes()
    except OSError:
        return False
    return b"moejob_trainer.interchange\0export" in command and str(folder).encode() in command


def refusal(runs: Runs, job: str, model: dict[str, str]) -> str:
    """Return the last line of a run that is refused before it trains."""
    run = runs.start(job, model=model)
    assert run.await_exit_codes() == [ExitCode.BAD_CONFIGURATION], run.read_log()
    assert not (run.folder / "model").exists()
    return run.last_line()
