"""Corrections of vLLM's own code by the plugin, as far as they can be seen without an engine."""

from __future__ import annotations

import io
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.renderers.base import BaseRenderer
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from moejob_rollout.plugin import register
from moejob_rollout.worker_replies import WorkerReplies

DONE, FAILED = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE

register()


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """All that vLLM's renderers log."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("vllm.renderers.base")
    logger.addHandler(handler)
    yield text
    logger.removeHandler(handler)


def warmed_up(tokenizer: Any) -> None:
    """Fill in a chat template, as the server does at its start."""

    def render_chat(*_: Any) -> None:
        renderer.get_tokenizer().apply_chat_template()

    renderer: Any = type("Renderer", (BaseRenderer,), {"render_messages": render_chat, "render_chat": render_chat})
    renderer = renderer.__new__(renderer)
    vars(renderer).update(tokenizer=tokenizer, _mm_warmup_future=None, _mm_warmup_done=True)
    renderer.warmup(None)


def test_a_server_without_a_tokenizer_starts_without_a_warning(said: io.StringIO) -> None:
    warmed_up(None)
    assert said.getvalue() == ""


def test_a_chat_template_that_is_wrong_is_still_logged(said: io.StringIO) -> None:
    # It has no such method.
    warmed_up(object())
    assert "Chat template warmup failed" in said.getvalue()
    assert "AttributeError" in said.getvalue()


class Workers:
    """vLLM's executor before workers whose replies the test decides."""

    def __init__(self, count: int) -> None:
        self._queues = [deque[tuple[Any, Any]]() for _ in range(count)]
        self.executor = MultiprocExecutor.__new__(MultiprocExecutor)
        replies = [WorkerReplies(_Queue(queue)) for queue in self._queues]
        vars(self.executor).update(
            is_failed=False, rpc_broadcast_mq=_Queue(deque()), response_mqs=replies, futures_queue=deque()
        )

    def say(self, worker: int, *replies: tuple[Any, Any]) -> None:
        self._queues[worker].extend(replies)

    def asked(self, **options: Any) -> Any:
        return self.executor.collective_rpc("anything", **options)


class _Queue:
    def __init__(self, content: deque[Any]) -> None:
        self._content = content

    def enqueue(self, asked: Any) -> None:
        """Workers here say what the test has them say."""

    def dequeue(self, timeout: float | None = None) -> Any:
        if timeout is not None and not self._content:
            raise TimeoutError
        return self._content.popleft()


def test_a_call_that_failed_on_one_worker_takes_nothing_from_the_next_call() -> None:
    workers = Workers(3)
    workers.say(0, (DONE, 10), (DONE, 20))
    workers.say(1, (FAILED, "no route to the trainer"), (DONE, 21))
    workers.say(2, (FAILED, "no route to the trainer"), (DONE, 22))
    with pytest.raises(RuntimeError, match="no route to the trainer"):
        workers.asked()
    assert workers.asked() == [20, 21, 22]


def test_a_worker_that_is_behind_is_awaited_by_the_next_call() -> None:
    workers = Workers(2)
    workers.say(0, (FAILED, "no route to the trainer"), (FAILED, "already active"), (DONE, 30))
    for reason in ("no route to the trainer", "already active"):
        with pytest.raises(RuntimeError, match=reason):
            workers.asked()
    workers.say(1, (FAILED, "no route to the trainer"), (DONE, 21), (DONE, 31))
    assert workers.asked() == [30, 31]


def test_a_call_has_failed_as_soon_as_one_worker_says_so_while_others_wait_for_it() -> None:
    workers = Workers(3)
    workers.say(2, (FAILED, "no route to the trainer"))
    with pytest.raises(RuntimeError, match="no route to the trainer"):
        workers.asked()
    # The others have learned of it, one of them only by now.
    workers.say(0, (FAILED, "rank 2 does not come"), (DONE, 20))
    workers.say(1, (FAILED, "rank 2 does not come"), (DONE, 21))
    workers.say(2, (DONE, 22))
    assert workers.asked() == [20, 21, 22]


def test_a_reply_that_came_before_the_failure_of_another_is_not_one_to_the_next_call() -> None:
    workers = Workers(2)
    workers.say(0, (DONE, 10), (DONE, 20))
    workers.say(1, (FAILED, "no room"), (DONE, 21))
    with pytest.raises(RuntimeError, match="no room"):
        workers.asked()
    assert workers.asked() == [20, 21]


def test_a_call_that_ran_out_of_time_takes_nothing_from_the_next_call() -> None:
    workers = Workers(2)
    workers.say(0, (DONE, 10), (DONE, 20))
    with pytest.raises(TimeoutError):
        workers.asked(timeout=0.0)
    workers.say(1, (DONE, 11), (DONE, 21))
    assert workers.asked() == [20, 21]


def test_a_call_to_one_worker_gets_its_own_reply_after_one_to_all_has_failed() -> None:
    workers = Workers(2)
    workers.say(0, (FAILED, "no room"), (DONE, 20))
    workers.say(1, (DONE, 11), (DONE, 21), (DONE, 31))
    with pytest.raises(RuntimeError, match="no room"):
        workers.asked()
    assert workers.asked(unique_reply_rank=1) == 21
    assert workers.asked() == [20, 31]


def test_a_call_to_one_worker_that_fails_waits_for_no_other() -> None:
    workers = Workers(2)
    workers.say(0, (FAILED, "no room"), (DONE, 20))
    workers.say(1, (DONE, 21))
    with pytest.raises(RuntimeError, match="no room"):
        workers.asked(unique_reply_rank=0)
    assert workers.asked() == [20, 21]


def test_heads_of_a_query_are_rotated_alike_whether_they_come_as_a_row_or_as_heads() -> None:
    tokens, heads, size = 5, 4, 64
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(size, 128, is_neox_style=False, dtype=torch.float32)
    torch.manual_seed(0)
    query, key = torch.randn(tokens, heads, size), torch.randn(tokens, 1, size)
    as_rows = rope.forward_cpu(torch.arange(tokens), query.flatten(1).clone(), key.flatten(1).clone())
    # As latent attention gives them: a part of what lies there.
    wider = torch.cat([torch.zeros(tokens, heads, 32), query], -1)
    as_heads = rope.forward_cpu(torch.arange(tokens), wider[..., 32:], key.clone())
    for row, head in zip(as_rows, as_heads, strict=True):
        assert torch.equal(row.view(head.shape), head)
    # Each token but the first is turned.
    assert ((as_heads[0] - query).abs().amax(2)[1:] > 0.1).all()
