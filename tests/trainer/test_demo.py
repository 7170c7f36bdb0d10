"""The demos, as a reader types them into a clone whose environments are there."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

import pytest

from checkouts import copy_checkout
from documented import ROOT, run_in_shell, typed_commands


def test_the_first_command_trains_a_model_and_asks_it(tmp_path: Path) -> None:
    commands = [one.command for one in typed_commands() if one.page == "README.md"]
    clone = copy_checkout(tmp_path)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    ran = run_in_shell(commands[0], clone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith("count from 2 to 5\n2 3 4 5")
    assert (clone / "runs" / "demo" / "export" / "config.json").exists()
    activated = next(command for command in commands if command.startswith("source "))
    assert run_in_shell(f"{activated} && moejob version", clone).returncode == 0


@pytest.mark.thorough
def test_the_second_demo_teaches_sums_by_their_reward(tmp_path: Path) -> None:
    clone = copy_checkout(tmp_path)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    ran = run_in_shell("make demo-grpo", clone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = (clone / "runs" / "tiny-grpo" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(step)["reward"] for step in steps]
    assert len(rewards) == 40
    # By as much as chance never moves a mean of 1,200 answers.
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.1
    assert "\nstep 1\n" in ran.stdout
    assert "\nstep 40\n" in ran.stdout
