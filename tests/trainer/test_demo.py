"""The README's first command, as a reader types it into a clone whose environments are there."""

from __future__ import annotations

from pathlib import Path

from checkouts import copied
from documented import ROOT, typed, typed_into_shell


def test_the_first_command_trains_a_model_and_asks_it(tmp_path: Path) -> None:
    commands = [one.command for one in typed() if one.page == "README.md"]
    clone = copied(tmp_path)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    ran = typed_into_shell(commands[0], clone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("count from 2 to 5\n2 3 4 5")
    assert (clone / "runs" / "demo" / "export" / "config.json").exists()
    activated = next(command for command in commands if command.startswith("source "))
    assert typed_into_shell(f"{activated} && moejob version", clone).returncode == 0
