"""`moejob chat` answers as Transformers' own generation does, piece by piece, and remembers the conversation."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from documented import ROOT
from engines import PYTHON as ROLLOUT_PYTHON
from moejob_api.contract.chat import ChatMessage, ChatReply, ChatRequest, parse_reply, request_line
from moejob_api.contract.texts import escaped_lines
from real_models import DENSE, find_real_model
from trainer import random_model

MOEJOB = ROOT / ".venv/operator/bin/moejob"
# Others are answered with special tokens alone, by weights that were never trained.
QUESTION = "what is the opposite of hot"
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model.write(folder)
    return folder


def generate(folder: Path, *messages: str) -> str:
    """Return the likeliest answer, by Transformers and without streaming."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    roles = ("user", "assistant")
    conversation = [{"role": roles[place % 2], "content": text} for place, text in enumerate(messages)]
    inputs = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    tokens = loaded.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    text: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def converse(folder: Path, *requests: ChatRequest) -> list[list[ChatReply]]:
    """Return the replies to each request."""
    process = subprocess.run(
        [sys.executable, "-m", "moejob_trainer.chat", str(folder)],
        input="".join(map(request_line, requests)),
        capture_output=True,
        text=True,
        check=True,
    )
    replies = [reply for line in process.stdout.splitlines() if (reply := parse_reply(line)) is not None]
    assert len(replies) == len(process.stdout.splitlines())
    answers: list[list[ChatReply]] = [[]]
    for reply in replies:
        answers[-1].append(reply)
        if reply.is_last:
            answers.append([])
    assert answers.pop() == []
    assert answers.pop(0) == [ChatReply(is_last=True)]
    return answers


def request(*messages: str, max_tokens: int = TOKENS) -> ChatRequest:
    roles = ("user", "assistant")
    turns = [ChatMessage(roles[place % 2], text) for place, text in enumerate(messages)]
    return ChatRequest(tuple(turns), max_tokens, 0.0)


def test_answers_are_those_of_transformers_and_a_conversation_is_one_prompt(model: Path) -> None:
    first = generate(model, QUESTION)
    second = generate(model, QUESTION, first, "hello")
    answers = converse(model, request(QUESTION), request(QUESTION, first, "hello"), request("x " * 4000))
    assert ["".join(reply.text for reply in replies) for replies in answers[:2]] == [first, second]
    assert first
    assert [reply.is_last for reply in answers[0]] == [False] * (len(answers[0]) - 1) + [True]
    [refused] = answers[2]
    assert "begin another one" in refused.problem


def test_a_prompt_of_the_command_line_or_of_a_pipe_is_answered_once(model: Path, tmp_path: Path) -> None:
    # A run is asked by its export.
    run = tmp_path / "run"
    run.mkdir()
    (run / "export").symlink_to(model)
    command = [str(MOEJOB), "chat", str(run), "--max-tokens", str(TOKENS)]
    environ = os.environ | {"MOEJOB_TRAINER_PYTHON": sys.executable}
    for arguments, text in (([QUESTION], None), ([], QUESTION)):
        answered = subprocess.run(
            command + arguments, input=text, capture_output=True, text=True, check=False, env=environ
        )
        assert answered.returncode == 0, answered.stderr
        assert answered.stdout.removesuffix("\n").removesuffix(" […]") == escaped_lines(generate(model, QUESTION))


@pytest.mark.thorough
def test_vllm_answers_as_transformers_does() -> None:
    folder = find_real_model(DENSE)
    answered = subprocess.run(
        [MOEJOB, "chat", folder, QUESTION, "--engine", "vllm", "--max-tokens", str(TOKENS)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MOEJOB_TRAINER_PYTHON": sys.executable, "MOEJOB_ROLLOUT_PYTHON": str(ROLLOUT_PYTHON)},
    )
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.removesuffix("\n").removesuffix(" […]") == escaped_lines(generate(folder, QUESTION))


def test_a_person_asks_until_end_of_file(model: Path) -> None:
    manager, terminal = pty.openpty()
    with subprocess.Popen(
        [str(MOEJOB), "chat", str(model), "--max-tokens", str(TOKENS)],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MOEJOB_TRAINER_PYTHON": sys.executable},
    ) as process:
        os.write(manager, f"{QUESTION}\nhello\n\x04".encode())
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors
    os.close(terminal)
    os.close(manager)
    first = generate(model, QUESTION)
    second = generate(model, QUESTION, first, "hello")
    assert output.count(escaped_lines(first)) >= 1
    assert escaped_lines(second) in output


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "neither a run folder nor an exported model"),
        ({"adapter_config.json": {}}, "holds adapters; name their run"),
        ({"config.json": {"model_type": "no-such-model"}}, "cannot be loaded"),
    ],
)
def test_what_holds_no_model_is_refused_with_a_reason(tmp_path: Path, files: dict[str, Any], words: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    refused = subprocess.run(
        [MOEJOB, "chat", tmp_path, QUESTION],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"MOEJOB_TRAINER_PYTHON": sys.executable},
    )
    assert refused.returncode == 78
    assert words in refused.stderr
