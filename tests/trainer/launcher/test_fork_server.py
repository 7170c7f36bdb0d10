"""Ranks of a fork server that has imported their modules can still use CUDA."""

from __future__ import annotations

import subprocess
import sys

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
