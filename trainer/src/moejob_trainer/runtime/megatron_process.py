"""The process that reads and writes Megatron's checkpoints, apart from the rank that waits for it.

Megatron-Bridge changes what it is imported into, and a checkpoint may be a stranger's: the process has no secret of
the job in its environment, sees no GPU, and ends with the rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from moejob_api.contract.pods import ExitCode
from moejob_trainer.errors import BadConfiguration, TransientFailure

_PROGRAM = "moejob_trainer.interchange"
# Everything else stays with the rank.
_NEEDED = ("PATH", "HOME", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
_FIXED = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
_TRACKER = "latest_checkpointed_iteration.txt"
# Others that write by torch.distributed.checkpoint have the index alone.
_ITERATION_FILES = (".metadata", "metadata.json")


def is_megatron_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of Megatron, or one iteration of it."""
    return (folder / _TRACKER).is_file() or all((folder / name).is_file() for name in _ITERATION_FILES)


def convert_from_megatron(checkpoint: Path, template: Path, folder: Path) -> None:
    """Write a checkpoint of Megatron as a Hugging Face folder; `template` has the config and the tokenizer."""
    _run_interchange("import", checkpoint, "--config", template, "--out", folder)


def convert_to_megatron(model: Path, folder: Path) -> None:
    """Write a Hugging Face folder as a checkpoint of Megatron, in place of an older one."""
    _run_interchange("export", model, "--out", folder, "--replace")


def require_convertible(template: Path) -> None:
    """Raise BadConfiguration where a model of this config.json cannot be written for Megatron."""
    _run_interchange("check", template)


def _run_interchange(*arguments: str | Path) -> None:
    environment = {name: os.environ[name] for name in _NEEDED if name in os.environ} | _FIXED
    command = [sys.executable, "-W", "ignore", "-m", _PROGRAM, *arguments, "--parent", str(os.getpid())]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if process.returncode == ExitCode.DONE:
        return
    reason = " ".join(process.stderr.split()) or f"it ended with code {process.returncode}"
    if process.returncode == -signal.SIGKILL:
        reason = "it was killed, as a rule for want of memory; raise resources.memory"
    if process.returncode == ExitCode.BAD_CONFIGURATION:
        raise BadConfiguration(reason)
    raise TransientFailure(f"the conversion of a checkpoint of Megatron failed: {reason[-2000:]}")
