"""Real rollout engines for tests: a process of the rollout environment, and what one says to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from builders import spec
from moejob_api.contract.answers import AnswerRequest, EngineAnswer
from moejob_api.contract.pod_environment import spec_text
from moejob_api.contract.pods import Environment, HttpPath, PodRole, engine_key
from ports import free_port

ROOT = Path(__file__).parent.parent
PYTHON = Path(os.environ.get("MOEJOB_ROLLOUT_PYTHON", ROOT / ".venv/rollout/bin/python"))
SECRET = "known to this attempt alone"
# An engine needs 10 s of a core; a busy machine takes ten minutes to give them.
_START_SECONDS, _ANSWER_SECONDS = 900.0, 300.0
# Never a proxy: the machine asks itself.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Reply:
    """The answer to one request."""

    status: int
    body: Any


class Engine:
    """One engine process."""

    def __init__(self, run_folder: Path, log: Path, port: int | None = None, **sections: Any) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "moejob_rollout"],
                env=dict(os.environ) | engine_environment(run_folder, [self.url], **sections),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def await_ready(self) -> Engine:
        """Wait until it has generated a token."""
        until = time.monotonic() + _START_SECONDS
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise AssertionError(f"the engine ended with {self._process.returncode}:\n{self.log[-4000:]}")
            try:
                if self.get(HttpPath.READY).status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the engine is not ready after {_START_SECONDS} s:\n{self.log[-4000:]}")

    def get(self, path: str, secret: str | None = SECRET) -> Reply:
        return self._send_request(path, None, secret)

    def post(
        self, path: str, body: Mapping[str, Any] | None = None, secret: str | None = SECRET, **query: str
    ) -> Reply:
        """Ask, and return the answer whatever its status."""
        named = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        return self._send_request(named, json.dumps(body or {}).encode(), secret)

    def post_or_fail(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """Ask for what has to work."""
        reply = self.post(path, body, **query)
        assert reply.status == 200, (path, reply.status, reply.body)
        return reply.body

    def generate(self, tokens: Sequence[int], **sampling: Any) -> dict[str, Any]:
        """Return one answer, with the log-probability of each of its tokens."""
        params = {"logprobs": 0, "detokenize": False, "ignore_eos": True} | sampling
        body: dict[str, Any] = self.post_or_fail(
            "/inference/v1/generate", {"token_ids": list(tokens), "sampling_params": params}
        )
        return body

    def request_answer(
        self, tokens: Sequence[int], max_tokens: int, seed: int = 0, stop_tokens: Sequence[int] = ()
    ) -> Reply:
        """Ask for one answer as the trainer does; the body is an EngineAnswer where the status is 200."""
        request = AnswerRequest(
            prompt=array("i", tokens).tobytes(),
            seed=seed,
            temperature=1.0,
            top_p=1.0,
            max_tokens=max_tokens,
            stop_tokens=tuple(stop_tokens),
        )
        reply = self.post(HttpPath.ANSWER, request.model_dump(mode="json"))
        return Reply(
            reply.status,
            EngineAnswer.model_validate_json(json.dumps(reply.body)) if reply.status == HTTPStatus.OK else reply.body,
        )

    def stop(self) -> int:
        """Ask it to end; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=300)

    def exit_code(self) -> int:
        """Wait for its end."""
        return self._process.wait(timeout=300)

    def kill(self) -> None:
        """End it and all of its workers at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=300)

    def is_gone(self) -> bool:
        """Wait for its processes to end; False when one does not."""
        until = time.monotonic() + _ANSWER_SECONDS
        while self.workers() and time.monotonic() < until:
            time.sleep(0.05)
        return not self.workers()

    def cpu_seconds(self) -> float:
        """The processor time that its processes have used."""
        ticks = 0
        for pid in self.workers():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def workers(self) -> list[int]:
        """The processes of its session that live, zombies left out."""
        return [pid for pid in _processes() if _session_of(pid) == self._process.pid]

    def _send_request(self, path: str, body: bytes | None, secret: str | None) -> Reply:
        headers = {"Content-Type": "application/json"}
        if secret is not None:
            headers["Authorization"] = f"Bearer {engine_key(secret)}"
        request = urllib.request.Request(self.url + path, body, headers)  # noqa: S310  # always http
        try:
            with _opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                return Reply(answer.status, _read(answer.read()))
        except urllib.error.HTTPError as error:
            return Reply(error.code, _read(error.read()))


def engine_environment(run_folder: Path, urls: Sequence[str], index: int = 0, **sections: Any) -> dict[str, str]:
    """The contract's variables of one engine; `sections` are those of a GRPO job."""
    base: dict[str, Any] = {"method": "GRPO", "resources": {"accelerator": "CPU"}}
    values = {
        Environment.SPEC: spec_text(spec(**{**base, **sections})),
        Environment.ROLE: PodRole.ROLLOUT.value,
        Environment.INDEX: str(index),
        Environment.HOST: "127.0.0.1",
        Environment.RUN_FOLDER: str(run_folder),
        Environment.ROLLOUT_URLS: ",".join(urls),
        Environment.SECRET: SECRET,
    }
    return {name.value: value for name, value in values.items()}


def _read(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _session_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[3])
