"""`moejob data` before anything is started, and as its answer is shown."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from moejob_api.contract.data_preview import (
    DataPreview,
    DatasetPreview,
    PreviewedExample,
    PreviewedText,
    PreviewLimits,
)
from moejob_api.contract.pods import ExitCode
from moejob_api.problems import InvalidSpec
from moejob_cli.app import app
from moejob_cli.data_preview import PreviewFailure, preview_file
from moejob_cli.data_report import data_report
from moejob_cli.option_types import OutputFormat
from moejob_cli.printing import print_document
from ports import free_port

EXAMPLE = str(Path(__file__).parents[2] / "examples/tiny-sft.yaml")


def test_a_missing_trainer_is_named_with_its_fix(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["data", EXAMPLE], env={"MOEJOB_TRAINER_PYTHON": str(tmp_path / "none")})
    assert result.exit_code == ExitCode.BAD_CONFIGURATION
    assert "set MOEJOB_TRAINER_PYTHON to the Python of the trainer" in result.output


STAND_IN = """#!/bin/sh
[ "$1" = -c ] && exit 0
echo "offline: $HF_HUB_OFFLINE$HF_DATASETS_OFFLINE" >&2
exit 78
"""
HUB_JOB = """
apiVersion: moejob.dev/v1alpha1
kind: MoETrainingJob
metadata: {name: hub}
spec:
  method: SFT
  model: {source: MODEL}
  data: {train: [{source: moejob/tiny-chats, format: Chat}]}
  training: {maxSteps: 1}
  storage: {size: 100Gi}
  resources: {accelerator: CPU, gpusPerNode: 1}
"""


def preview_offline(folder: Path, source: str, endpoint: str, **environ: str) -> PreviewFailure:
    """Return what `moejob data` says with a stand-in for the trainer's Python, which prints what it was given."""
    python, file = folder / "python", folder / "job.yaml"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    file.write_text(HUB_JOB.replace("MODEL", source))
    variables = {"PATH": "/usr/bin:/bin", "MOEJOB_TRAINER_PYTHON": str(python), "HF_ENDPOINT": endpoint, **environ}
    failure = preview_file(str(file), PreviewLimits(1, 1), environ=variables)
    assert isinstance(failure, PreviewFailure)
    return failure


def test_a_hub_that_is_away_is_waited_for_once_and_named(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    assert preview_offline(tmp_path, "team/model", endpoint).message == (
        f"offline: 11\nthe hub at {endpoint} does not answer from this machine"
    )


def test_a_hub_that_answers_is_asked(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert preview_offline(tmp_path, "team/model", endpoint).message == "offline:"


def test_a_job_without_names_of_the_hub_and_one_behind_a_proxy_need_no_connection(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    assert preview_offline(tmp_path, "moejob/tiny-moe", endpoint).message == "offline:"
    assert preview_offline(tmp_path, "team/model", endpoint, https_proxy="http://p").message == "offline:"


def test_a_job_that_cannot_be_read_is_refused_as_by_every_command(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("spec: {method: SFT")
    with pytest.raises(InvalidSpec):
        CliRunner().invoke(app, ["data", str(file)], catch_exceptions=False)


def test_a_reason_for_every_record_and_no_control_character_is_shown() -> None:
    parts = (PreviewedText(text="a\x1b[31m\nb", trained=False), PreviewedText(text="c", trained=True))
    dataset = DatasetPreview(
        part="train[0]",
        source="a.jsonl",
        split="train",
        format="Chat",
        records=14,
        is_whole=False,
        kept=1,
        truncated=0,
        dropped=13,
        tokens=4,
        trained_tokens=1,
        lengths=(4, 4, 4),
        left_out=(),
        examples=(PreviewedExample(place="a.jsonl, line 1", tokens=4, trained_tokens=1, parts=parts),),
    )
    console = Console(color_system=None, width=120)
    with console.capture() as captured:
        console.print(data_report(DataPreview(datasets=(dataset,))))
    shown = captured.get()
    assert "the first 14 records" in shown
    assert "4 tokens, 1 of them trained on (25%)" in shown
    assert "and 13 more" in shown
    assert "a [31m" in shown
    assert "\n    b⟦c⟧" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("output", [OutputFormat.JSON, OutputFormat.YAML])
def test_documents_escape_what_a_terminal_would_obey(output: OutputFormat, capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text": "\x1b[2J \x9b31m \u202egnirts"}
    print_document(value, output)
    shown = capsys.readouterr().out
    assert shown.replace("\n", "").isprintable()
    assert yaml.safe_load(shown) == value
    print_document({"text": "Größe 大"}, output)
    assert "Größe 大" in capsys.readouterr().out
