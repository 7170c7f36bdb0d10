"""Ten thousand damaged inputs for each parser of what ranks, launchers and earlier runs wrote, and for the store.

Each is answered, refused or read within its bounds; nothing else is raised. `make fuzz` draws a million others.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from fuzzing import damage_sample, random_sources
from moejob_api.contract.pods import RunFile, RunOwner, fence_token_name, parse_token_name
from moejob_trainer.checkpoints.manifest import (
    CheckpointManifest,
    DamagedCheckpoint,
    FileEntry,
    build_manifest,
    build_marker,
    read_manifest,
)
from moejob_trainer.checkpoints.names import MANIFEST, MARKER
from moejob_trainer.checkpoints.run import acquire_run_folder
from moejob_trainer.distributed.encoding import BadMessage, decode_message, encode_message
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.launcher.store import Operation, StoreEntries, StoreRequest, StoreServer
from moejob_trainer.rewards.completion import FailureKind, RewardFailed
from moejob_trainer.rewards.functions import validate_scores
from moejob_trainer.rewards.messages import WorkerFailure, WorkerReply, read_reply
from moejob_trainer.rewards.service import parse_scores
from trainer.checkpoints.stand_ins import make_facts

WHOLE = build_manifest([FileEntry(name="__0_0.distcp", size_bytes=5, hash="0" * 32)], make_facts(20)).to_json()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on no disk: thousands of files are written there."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_a_damaged_manifest_or_marker_is_never_trusted(memory: Path) -> None:
    vouched = build_marker(WHOLE).to_json()
    for draw in random_sources():
        content, beside = damage_sample(draw, [WHOLE]), damage_sample(draw, [vouched])
        # One is damaged and vouched for, or neither belongs to the other.
        is_forged = draw.random() < 0.5
        (memory / MANIFEST).write_bytes(content)
        (memory / MARKER).write_bytes(build_marker(content).to_json() if is_forged else beside)
        try:
            found = read_manifest(memory)
        except (DamagedCheckpoint, BadConfiguration):
            continue
        assert is_forged or content == WHOLE
        assert not any(entry.name.startswith("/") or ".." in entry.name.split("/") for entry in found.files)
        assert CheckpointManifest.model_validate_json(found.to_json()) == found


def test_a_run_folder_whose_owner_file_is_damaged_is_left_alone(memory: Path) -> None:
    mine = RunOwner(job="sft", uid="1234")
    written = memory / RunFile.OWNER
    content = mine.model_dump_json().encode()
    for draw in random_sources():
        wrong = damage_sample(draw, [content])
        written.write_bytes(wrong)
        with suppress(BadConfiguration):
            acquire_run_folder(memory, mine)
        assert written.read_bytes() == wrong


def test_a_file_name_is_a_fence_token_or_none() -> None:
    for draw in random_sources():
        name = damage_sample(draw, [fence_token_name(3, 1).encode()]).decode(errors="replace")
        found = parse_token_name(name)
        assert found is None or parse_token_name(fence_token_name(*found)) == found


def test_a_message_of_a_rank_is_of_the_type_that_is_expected_or_is_refused() -> None:
    kind = TypeAdapter(dict[str, list[float]])
    text = encode_message({"loss": [1.5, float("nan")]}, kind)
    for draw in random_sources():
        with suppress(BadMessage):
            assert all(
                isinstance(value, float)
                for row in decode_message(damage_sample(draw, [text]), kind).values()
                for value in row
            )


def test_an_answer_of_a_reward_is_finite_numbers_or_a_failure_with_a_reason() -> None:
    scores = b'{"scores": [0.5, 1, -2e3], "model": {"name": "judge"}}'
    line = WorkerReply(request=1, scores=(0.5, 1.0, -2e3)).model_dump_json().encode()
    failed = WorkerReply(request=1, failure=WorkerFailure(kind=FailureKind.EXCEPTION, message="no")).model_dump_json()
    readable = 0
    for draw in random_sources():
        with suppress(RewardFailed):
            assert all(map(math.isfinite, validate_scores(parse_scores(damage_sample(draw, [scores])), 3)))
            readable += 1
        with suppress(RewardFailed):
            answer = read_reply(damage_sample(draw, [line, failed.encode()]))
            assert all(map(math.isfinite, answer.scores))
            readable += 1
    assert readable > 0


class _Writer:
    """Keeps what the store answers."""

    def __init__(self) -> None:
        self.answer = b""

    def write(self, content: bytes) -> None:
        self.answer += content

    async def drain(self) -> None: ...

    def close(self) -> None: ...


def test_the_store_answers_strangers_nothing_and_its_own_within_bounds() -> None:
    requests = [
        StoreRequest(operation=Operation.PUT_FIRST, name="round/1/ranks", text="x" * 100).model_dump_json().encode(),
        StoreRequest(operation=Operation.COUNT, name="round/1", number=1).model_dump_json().encode(),
        StoreRequest(operation=Operation.COUNT_AT_END, name="departed/1").model_dump_json().encode(),
    ]
    frames = [len(request).to_bytes(4, "big") + request for request in requests]
    entries = StoreEntries(limit_bytes=10_000)
    server = StoreServer(entries, b"the key of an attempt")

    async def story() -> int:
        answers = 0
        for draw in random_sources():
            for serves in (server._serve_client, server._reply_to_requests):  # noqa: SLF001 the second is behind the proof of a key
                reader, writer = asyncio.StreamReader(), _Writer()
                reader.feed_data(damage_sample(draw, frames))
                reader.feed_eof()
                try:
                    await serves(reader, writer)  # type: ignore[arg-type]
                except (ValueError, asyncio.IncompleteReadError):
                    assert serves == server._reply_to_requests  # noqa: SLF001
                # A stranger sees the nonce that he is asked to prove a key over, and no more.
                assert serves == server._reply_to_requests or len(writer.answer) <= 32  # noqa: SLF001
                answers += serves == server._reply_to_requests and bool(writer.answer)  # noqa: SLF001
        return answers

    assert asyncio.run(story()) > 0
