"""`moejob chat`: a conversation with the model of a run or an export, in a program of an environment that can run it.

vLLM answers where its environment and a GPU are, Transformers in the trainer's environment otherwise: on CPUs vLLM
takes longer to start than most conversations last.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import typer

from moejob_api.contract.chat import (
    TRANSFORMERS_MODULE,
    VLLM_MODULE,
    ChatMessage,
    ChatReply,
    ChatRequest,
    parse_reply,
    request_line,
)
from moejob_api.contract.pods import RunFile, escaped_lines
from moejob_cli.interchange import ADAPTERS, CONFIG, CheckpointChoice, export_checkpoint
from moejob_cli.job_names import is_job_name
from moejob_cli.notices import print_notice, show_duration
from moejob_cli.option_types import ChatEngine
from moejob_cli.running.machine import CannotRun, find_local_machine

_LAST_ERROR_LINES = 20


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The sampling of answers, and the first message of the conversation."""

    system: str | None
    max_tokens: int
    temperature: float

    @property
    def first_messages(self) -> list[ChatMessage]:
        """The messages before the first question."""
        return [] if self.system is None else [ChatMessage("system", self.system)]


class ChatProcess:
    """A program that has loaded a model; made by `start_chat`."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str], options: ChatOptions) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process needs pipes for requests and replies")
        self._process, self._requests, self._replies = process, process.stdin, process.stdout
        self._errors, self._options = errors, options
        self._messages = options.first_messages

    def await_model(self) -> None:
        """Return when the model is loaded; CannotRun when it cannot be."""
        self._read_reply()

    def ask_question(self, question: str) -> Iterator[str]:
        """Yield the pieces of the answer, and remember both; CannotRun where there is none."""
        messages = [*self._messages, ChatMessage("user", question)]
        request = ChatRequest(tuple(messages), self._options.max_tokens, self._options.temperature)
        try:
            self._requests.write(request_line(request))
            self._requests.flush()
        except BrokenPipeError:
            raise CannotRun(self._describe_end()) from None
        answer = ""
        while not (reply := self._read_reply()).is_last:
            answer += reply.text
            yield escaped_lines(reply.text)
        if reply.problem:
            raise CannotRun(escaped_lines(reply.problem))
        self._messages = [*messages, ChatMessage("assistant", answer)]
        if reply.is_cut:
            yield " […]"

    def _read_reply(self) -> ChatReply:
        for line in self._replies:
            if (reply := parse_reply(line)) is not None:
                return reply
        raise CannotRun(self._describe_end())

    def _describe_end(self) -> str:
        exit_code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()[-_LAST_ERROR_LINES:]
        return escaped_lines("\n".join(lines)) or f"the program with the model ended with exit code {exit_code}"


@contextmanager
def start_chat(
    folder: Path, engine: ChatEngine | None, options: ChatOptions, environ: Mapping[str, str] = os.environ
) -> Iterator[ChatProcess]:
    """Load a model in a program of its own, which ends with the conversation. CannotRun where none can be started."""
    command = choose_program(engine, environ)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [*command, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=dict(environ),
            # Ctrl-C is for the command, which ends the program and what that has started.
            start_new_session=True,
        )
        try:
            chat = ChatProcess(process, errors, options)
            # Neither vLLM nor Transformers says how much of a model is loaded.
            with show_duration("loading the model"):
                chat.await_model()
            yield chat
        finally:
            # vLLM computes in a process of its own, which holds pipes and GPU, and outlives the one that began it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def choose_program(engine: ChatEngine | None, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of the program that answers. CannotRun where it is not installed."""
    machine = find_local_machine(environ)
    has_vllm = os.access(machine.rollout_python, os.X_OK)
    if engine is None:
        engine = ChatEngine.VLLM if has_vllm and machine.gpus else ChatEngine.TRANSFORMERS
    if engine is ChatEngine.TRANSFORMERS:
        return [str(machine.python), "-W", "ignore", "-m", TRANSFORMERS_MODULE]
    if not has_vllm:
        raise CannotRun(
            f"vLLM is not here: {machine.rollout_python} is no program; leave --engine out, or set "
            "MOEJOB_ROLLOUT_PYTHON to the Python of an environment with moejob-rollout"
        )
    return [str(machine.rollout_python), "-W", "ignore", "-m", VLLM_MODULE]


@contextmanager
def find_model(place: Path, environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Give the model of an export or of a run; of a run without an export its newest checkpoint, exported meanwhile."""
    for folder in (place, place / RunFile.EXPORT):
        if (folder / CONFIG).is_file():
            yield folder
            return
    if (place / ADAPTERS).is_file():
        raise CannotRun(f"{place} holds adapters; name their run, or `moejob export RUN --merge-adapters --out FOLDER`")
    if not (place / RunFile.SPEC).is_file():
        fix = (
            f"`moejob export {place} --out FOLDER` fetches that of a job" if is_job_name(place) else "name one of them"
        )
        raise CannotRun(f"{place} is neither a run folder nor an exported model; {fix}")
    with tempfile.TemporaryDirectory(prefix="moejob-chat-") as temporary:
        out = Path(temporary) / "model"
        print_notice(f"exporting the newest checkpoint of {place}")
        exported = export_checkpoint(place, out, CheckpointChoice(merge_adapters=_trains_adapters(place)), environ)
        if exported.exit_code:
            raise CannotRun(exported.message)
        yield out


def _trains_adapters(run: Path) -> bool:
    spec = json.loads((run / RunFile.SPEC).read_bytes())
    return bool(spec.get("training", {}).get("lora"))


def answer_once(chat: ChatProcess, question: str) -> None:
    """Print the answer to one question as it comes."""
    for piece in chat.ask_question(question):
        typer.echo(piece, nl=False)
    typer.echo()


def hold_conversation(chat: ChatProcess) -> None:
    """Ask a person for questions until end of file."""
    typer.echo("Ctrl-D ends", err=True)
    while True:
        try:
            question = input("> ")
        except EOFError:
            typer.echo()
            return
        if question.strip():
            answer_once(chat, question)


def read_question(prompt: str | None) -> str | None:
    """Return the one question of the command line or of standard input; None where a person asks."""
    if prompt is not None:
        return prompt
    return None if sys.stdin.isatty() else sys.stdin.read().strip()
