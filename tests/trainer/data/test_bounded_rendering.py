"""A chat template is a stranger's program: whatever it does takes bounded time and memory, and ends with its record."""

from __future__ import annotations

import resource
import signal

import pytest

from moejob_trainer.data import bounded_rendering, tiny
from moejob_trainer.data.chat_template import ChatTemplate
from moejob_trainer.data.conversations import read_conversation
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData
from trainer.training_data import make_chat

CHAT = read_conversation(Record(make_chat("hi", "hello"), "chats.jsonl, line 3"))
DOUBLED = "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        pytest.param("{% for i in range(10 ** 9) %}{% endfor %}", r"computes a power \(\*\*\)", id="a power"),
        pytest.param("{% for i in range(1000000000) %}x{% endfor %}", "too big", id="a long range"),
        pytest.param("{{ 'a' * 100000000000 }}", "more than 1024 MiB", id="a product of a text"),
        pytest.param("{% set n = 100000000000 %}{{ 'a' * n }}", "more than 1024 MiB", id="a product when it runs"),
        pytest.param("{{ [0] * 100000000000 }}", "more than 1024 MiB", id="a product of a list"),
        pytest.param(DOUBLED, "more than 1024 MiB", id="doubled"),
        pytest.param("{{ '%999999999999d' % 1 }}", "fails", id="a width"),
        pytest.param("{{ 'a' * 9000000 }}", "writes 9,000,000 characters", id="a long text"),
        pytest.param("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "calls itself too often", id="recursion"),
        pytest.param("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "calls itself too often|fails", id="nesting"),
        pytest.param("{{ 1 // 0 }}", "division", id="division by zero"),
        pytest.param("{{ [][3].x }}", "fails", id="nothing there"),
        pytest.param("{{ '\\ud800' }}", r"holds \\ud800", id="half of a pair"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe|fails", id="Python's objects"),
        pytest.param("{% include '/etc/passwd' %}", "fails", id="a file"),
    ],
)
def test_a_template_beyond_its_bounds_is_refused_with_its_record(template: str, reason: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(BadData, match=rf"(?s)chats.jsonl, line 3.*({reason})"):
        ChatTemplate(tiny.build_tokenizer(), template).render_prompt(CHAT)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_loops_end_by_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_rendering, "_SECONDS", 0.5)
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(BadData, match="line 3: the chat template fails: it takes more than"):
        ChatTemplate(tiny.build_tokenizer(), endless).render_prompt(CHAT)
