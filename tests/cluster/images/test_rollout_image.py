"""Engines in their images, on the CPU: they serve what a trainer exported.

`make test-images` does it; each of these images takes ten gigabytes and five minutes, the first time.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cluster.extent import with_all_images
from cluster.images.conftest import Contains
from cluster.images.tiny import SECONDS, trained
from cluster.processes import Process
from confined import Container
from moejob_api.contract.pods import RunFile
from ports import free_port

pytestmark = [pytest.mark.cluster, with_all_images]

SERVER = ("-m", "vllm.entrypoints.openai.api_server")
SMALL = ("--model=/model", "--served-model-name=tiny", "--max-model-len=256", "--max-num-seqs=4", "--enforce-eager")


@pytest.mark.parametrize(
    ("name", "python"), [("rollout-cpu", "python"), ("trainer-colocated-cpu", "/opt/rollout/bin/python")]
)
def test_an_engine_serves_what_a_trainer_exported(container: Contains, tmp_path: Path, name: str, python: str) -> None:
    model = trained(container, tmp_path, steps=6) / RunFile.EXPORT
    port = free_port()
    command = (python, *SERVER, *SMALL, "--host=127.0.0.1", f"--port={port}")
    # It looks for cores there.
    mounted = {"/model": model, "/sys": Path("/sys")}
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    made = container(name, Container(command, variables, mounted))
    engine = Process("engine", made.words, tmp_path)
    engine.start()
    try:
        engine.wait_until(lambda: answered(port, "/health") is not None, SECONDS)
        asked = {"model": "tiny", "prompt": "What is 2 plus 2?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        said = answered(port, "/v1/completions", asked)
    finally:
        engine.stop()
    assert said is not None
    assert json.loads(said)["usage"]["completion_tokens"] == 8


def answered(port: int, path: str, body: dict[str, Any] | None = None) -> bytes | None:
    """Return what the server says; None while it does not serve."""
    content = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content)
    asked.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - a server of ours
            said: bytes = answer.read()
            return said
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
    except OSError:
        return None
