"""Megatron is imported without what it would import for layers that no rank uses."""

from __future__ import annotations

import subprocess
import sys

LOADED = """
import sys, torch
compiling = torch.compile
import moejob_trainer.megatron.training_engine
assert torch.compile is compiling
print(*(name for name in ("megatron.core", "torch._inductor.compile_fx", "wandb") if name in sys.modules))
import wandb
print(wandb.__name__)
"""


def test_megatron_comes_without_a_compiler_and_leaves_all_as_it_was() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.splitlines() == ["megatron.core", "wandb"], done.stderr


WARNED = """
import moejob_trainer.rank, megatron.core.models.backends, warnings
warnings.warn("Transformer Engine and others differ")
"""


def test_megatron_says_nothing_of_packages_that_no_rank_uses_and_other_warnings_are_shown() -> None:
    done = subprocess.run([sys.executable, "-c", WARNED], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, "not installed" in done.stderr) == (0, False), done.stderr
    assert "Transformer Engine and others differ" in done.stderr


def test_a_rank_reads_data_of_its_own_without_the_library_of_the_hub() -> None:
    command = "import sys, moejob_trainer.rank; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "False\n", done.stderr
