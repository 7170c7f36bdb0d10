"""`moejob chat` ends with every process of its engine: vLLM computes in one that its first process does not end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from cli.test_commands import moejob

ENGINE = """#!{python}
import subprocess, sys
from pathlib import Path
from moejob_api.contract.chat import ChatReply, reply_line

child = subprocess.Popen(["sleep", "infinity"])
Path({pid_file!r}).write_text(str(child.pid))
print(reply_line(ChatReply(is_last=True)), end="", flush=True)
sys.stdin.readline()
print(reply_line(ChatReply("cold")), reply_line(ChatReply(is_last=True)), sep="", end="", flush=True)
sys.stdin.readline()
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_processes_that_an_engine_has_started_end_with_the_conversation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    engine, pid_file = tmp_path / "python", tmp_path / "pid"
    engine.write_text(ENGINE.format(python=sys.executable, pid_file=str(pid_file)))
    engine.chmod(0o755)
    answer = moejob("chat", str(tmp_path), "hot", "--engine", "vllm", MOEJOB_ROLLOUT_PYTHON=str(engine))
    assert (answer.returncode, answer.stdout) == (0, "cold\n"), answer.stderr
    deadline = time.monotonic() + 60
    while is_running(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
