"""Ranks of a fork server that has imported their modules can still use CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Megatron asks torch for a GPU while it is imported. A forked process that can use CUDA ends with 0.
FORKED = """
import os
from moejob_trainer.launcher import fork_server

with fork_server.unused_cuda():
    fork_server.import_all(["megatron.core.dist_checkpointing.strategies.torch"])
import torch

child = os.fork()
if child == 0:
    os._exit(int(torch.cuda._is_in_bad_fork()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


def test_imports_that_look_for_a_gpu_leave_it_to_the_ranks() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "None"]


# Megatron's inference asks for flashinfer, which asks CUDA for the GPU's properties.
ABSENT = """
import sys
from moejob_trainer.launcher import fork_server

with fork_server.unused_cuda():
    fork_server.import_all(["megatron.core.dist_checkpointing.strategies.torch"])
print("flashinfer" in sys.modules)
import flashinfer
"""


def test_a_package_that_asks_cuda_as_it_loads_is_absent_while_ranks_inherit_their_imports(tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").write_text("print('asks CUDA')\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ABSENT],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["False", "asks CUDA"]
