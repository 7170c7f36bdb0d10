"""Templates that we marked: they write what the published ones write, and mark all of it that the assistant says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from moejob_trainer.data import tiny
from moejob_trainer.data.chat_template import ChatTemplate
from moejob_trainer.data.conversations import read_conversation
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData
from trainer.training_data import assistant, make_chat, user

QWEN, DEEPSEEK, GLM, GPT_OSS = FAMILIES = ("qwen3", "deepseekv3", "glm4moe", "gptoss")
PLACE = "chats.jsonl, line 3"


def read_published_template(name: str) -> str:
    return (Path(__file__).parents[1] / "templates" / f"{name}.jinja").read_text()


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    found = tiny.build_tokenizer()
    found.add_special_tokens({"bos_token": "<|begin|>"})
    found.chat_template = template
    return found


TOKENIZERS = {name: tokenizer(read_published_template(name)) for name in FAMILIES}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def call(*cities: str, said: str = "", **more: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    return {"role": "assistant", "content": said, "tool_calls": calls, **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def thinking(thought: str, text: str, name: str) -> dict[str, Any]:
    """An answer after a thought, under the key that the template reads."""
    return {**assistant(text), "thinking" if name == GPT_OSS else "reasoning_content": thought}


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TURNS = make_chat("hi", "hello", "bye", "see\nyou")["messages"]
USED = [user("sunny?"), call("Łódź"), result('{"sun": "yes"}'), assistant("it is 🌞")]
# DeepSeek's says nothing of tools that are offered, and refuses a thought that it would drop.
PLAIN = {
    "one turn": make_chat("hi", "hello"),
    "turns": {"messages": TURNS},
    "system": {"messages": [system("be brief"), *TURNS]},
    "parting blanks": make_chat("hi", "hello\n", " bye ", "see you"),
    "a tool was called": {"messages": [system("help"), *USED, user("and now?"), assistant("rain")]},
    "thoughts of an earlier turn": {
        "messages": [user("hi"), assistant("<think>\nhm\n</think>\n\nhello"), user("a"), assistant("b")]
    },
}
RICH = {
    **{name: {**fields, "tools": [TOOL]} for name, fields in PLAIN.items()},
    "ends with a call": {"messages": [*TURNS, user("sunny?"), call("Łódź")], "tools": [TOOL]},
    "calls one after another": {
        "messages": [*USED[:3], call("Oslo"), result("no"), assistant("one of two")],
        "tools": [TOOL],
    },
}
TWICE = {
    "several calls at once": {
        "messages": [
            user("sunny?"),
            call("Łódź", "Oslo", said="I look"),
            result("yes"),
            result("no"),
            assistant("one of two"),
        ],
        "tools": [TOOL],
    },
    "a thought in the text": make_chat("hi", "<think>\nhm\n</think>\n\nhello"),
    "a thought before a call": {
        "messages": [user("sunny?"), call("Oslo", reasoning_content="I look"), result("no"), assistant("no")],
        "tools": [TOOL],
    },
}


def cases() -> Iterator[Any]:
    for name in FAMILIES:
        kinds = {**PLAIN}
        kinds |= RICH if name != DEEPSEEK else {}
        kinds |= TWICE if name in (QWEN, GLM) else {}
        if name != DEEPSEEK:
            kinds["a thought"] = {"messages": [*TURNS, user("why?"), thinking("hm", "so", name)]}
        if name == GPT_OSS:
            kinds["a thought before a call"] = {
                "messages": [user("sunny?"), call("Oslo", thinking="I look")],
                "tools": [TOOL],
            }
        yield from (pytest.param(name, fields, id=f"{name}, {kind}") for kind, fields in kinds.items())


def as_published(name: str, fields: dict[str, Any], prompt: bool = False) -> str:
    """Return the text that Transformers makes of the published template."""
    messages = json.loads(json.dumps(fields["messages"]))
    if name == DEEPSEEK:
        # It takes arguments as text alone.
        for made in (made for message in messages for made in message.get("tool_calls", ())):
            made["function"]["arguments"] = json.dumps(made["function"]["arguments"], ensure_ascii=False)
    text: Any = TOKENIZERS[name].apply_chat_template(
        messages, tools=fields.get("tools"), tokenize=False, add_generation_prompt=prompt
    )
    return str(text)


def ours(name: str) -> ChatTemplate:
    return ChatTemplate(TOKENIZERS[name], None)


def closing(name: str, fields: dict[str, Any]) -> str:
    """GLM ends a turn with the token that begins the next; published, the last turn has no end to learn."""
    if name != GLM:
        return ""
    return "<|observation|>" if fields["messages"][-1].get("tool_calls") else "<|user|>"


@pytest.mark.parametrize(("name", "fields"), cases())
def test_a_marked_template_writes_what_the_published_one_writes(name: str, fields: dict[str, Any]) -> None:
    rendered = ours(name).render_conversation(read_conversation(Record(fields, PLACE)))
    assert rendered.text == as_published(name, fields) + closing(name, fields)


@pytest.mark.parametrize(("name", "fields"), cases())
def test_each_message_can_be_trained_on_alone(name: str, fields: dict[str, Any]) -> None:
    messages = fields["messages"]
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    alone = list[tuple[int, int]]()
    for chosen in answers:
        weighed = [
            {**message, "weight": int(number == chosen)} if number in answers else message
            for number, message in enumerate(messages)
        ]
        alone += ours(name).render_conversation(read_conversation(Record({**fields, "messages": weighed}, PLACE))).spans
    assert tuple(alone) == ours(name).render_conversation(read_conversation(Record(fields, PLACE))).spans
    assert len(alone) == len(answers)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_for_an_answer_is_the_published_one(name: str) -> None:
    for messages in (TURNS[:3], [system("be brief"), *USED, user("and now?")]):
        asked = {"messages": messages}
        assert ours(name).render_prompt(read_conversation(Record(asked, PLACE))) == as_published(
            name, asked, prompt=True
        )


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: "<" not in text and text.strip()
)
turns = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


@given(name=st.sampled_from(FAMILIES), spoken=turns, instructed=st.booleans())
def test_whatever_is_said_is_written_as_published_and_marked(
    name: str, spoken: list[tuple[str, str]], instructed: bool
) -> None:
    said = make_chat(*(text for turn in spoken for text in turn))["messages"]
    fields = {"messages": [system("be brief"), *said] if instructed else said}
    rendered = ours(name).render_conversation(read_conversation(Record(fields, PLACE)))
    assert rendered.text == as_published(name, fields) + closing(name, fields)
    for (start, end), (_, answer) in zip(rendered.spans, spoken, strict=True):
        assert answer.strip() in rendered.text[start:end]


END = "<｜end▁of▁sentence｜>"
QWEN_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Łódź"}}\n</tool_call><|im_end|>'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Łódź"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
GLM_CALL = "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Łódź</arg_value>\n</tool_call><|observation|>"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        pytest.param(
            QWEN, TURNS, ["hello<|im_end|>", "<think>\n\n</think>\n\nsee\nyou<|im_end|>"], id="Qwen 3, several turns"
        ),
        pytest.param(
            QWEN,
            USED,
            [QWEN_CALL, "<think>\n\n</think>\n\nit is 🌞<|im_end|>"],
            id="Qwen 3, tools",
        ),
        pytest.param(
            QWEN,
            [user("why?"), thinking("hm", "so", QWEN)],
            ["<think>\nhm\n</think>\n\nso<|im_end|>"],
            id="Qwen 3, a thought",
        ),
        pytest.param(DEEPSEEK, TURNS, [f"hello{END}", f"see\nyou{END}"], id="DeepSeek, several turns"),
        pytest.param(DEEPSEEK, USED, [f"{DEEPSEEK_CALL}{END}", f"it is 🌞{END}"], id="DeepSeek, tools"),
        pytest.param(
            GLM,
            TURNS,
            ["\n<think></think>\nhello<|user|>", "\n<think></think>\nsee\nyou<|user|>"],
            id="GLM 4.5, several turns",
        ),
        pytest.param(
            GLM,
            USED,
            [f"\n<think></think>{GLM_CALL}", "\n<think></think>\nit is 🌞<|user|>"],
            id="GLM 4.5, tools",
        ),
        pytest.param(
            GLM,
            [user("why?"), thinking("hm", "so", GLM)],
            ["\n<think>hm</think>\nso<|user|>"],
            id="GLM 4.5, a thought",
        ),
        # It ended the first turn with <|return|> too, which is not what stands there.
        pytest.param(GPT_OSS, TURNS, [f"{FINAL}hello", f"{FINAL}see\nyou<|return|>"], id="gpt-oss, several turns"),
        pytest.param(
            GPT_OSS,
            USED,
            [
                ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Łódź"}<|call|>',
                f"{FINAL}it is 🌞<|return|>",
            ],
            id="gpt-oss, tools",
        ),
        pytest.param(
            GPT_OSS,
            [user("why?"), thinking("hm", "so", GPT_OSS)],
            [f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}so<|return|>"],
            id="gpt-oss, a thought",
        ),
    ],
)
def test_what_is_marked_is_what_the_assistant_says_with_the_end_of_its_turn(
    name: str, messages: list[dict[str, Any]], said: list[str]
) -> None:
    rendered = ours(name).render_conversation(read_conversation(Record({"messages": messages}, PLACE)))
    assert [rendered.text[start:end] for start, end in rendered.spans] == said


@pytest.mark.parametrize(("name", "fields"), cases())
def test_what_precedes_a_mark_is_the_prompt_for_it(name: str, fields: dict[str, Any]) -> None:
    """The first tokens that are trained on are the first that the model will be asked for."""
    rendered = ours(name).render_conversation(read_conversation(Record(fields, PLACE)))
    first = next(n for n, message in enumerate(fields["messages"]) if message["role"] == "assistant")
    asked = as_published(name, {**fields, "messages": fields["messages"][:first]}, prompt=True)
    # DeepSeek-R1 is asked to think, and its template drops what it thought.
    assert rendered.text[: rendered.spans[0][0]] == asked.removesuffix("<think>\n")


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        pytest.param(DEEPSEEK, [user("a"), thinking("hm", "b", DEEPSEEK)], "leaves out the thoughts", id="a thought"),
        pytest.param(DEEPSEEK, [*USED, *USED], "a second assistant message calls tools", id="DeepSeek, calls again"),
        pytest.param(GLM, [user("a"), assistant("b"), assistant("c")], "stops only for a user or a tool", id="GLM"),
        pytest.param(GPT_OSS, [user("a"), call("Oslo", "Łódź")], "has 2 tool calls", id="gpt-oss, calls at once"),
        pytest.param(
            GPT_OSS, [user("a"), thinking("hm", "b", QWEN)], "leaves out the thoughts", id="gpt-oss, another key"
        ),
    ],
)
def test_what_a_template_would_leave_out_is_refused(name: str, messages: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(BadData, match=f"^{PLACE}: .*{said}"):
        ours(name).render_conversation(read_conversation(Record({"messages": messages}, PLACE)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_that_differs_from_the_one_we_know_is_not_guessed_at(name: str) -> None:
    changed = read_published_template(name) + "{# ours #}"
    with pytest.raises(BadData, match=r"this template \(SHA-256 [0-9a-f]{12}\.\.\.\) is none of those published with"):
        ChatTemplate(tokenizer(changed), None).render_conversation(
            read_conversation(Record({"messages": TURNS}, PLACE))
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_line_breaks_of_another_kind_and_at_the_end_make_no_other_template(name: str) -> None:
    stored = read_published_template(name).removesuffix("\n").replace("\n", "\r\n") + "\n"
    rendered = ChatTemplate(tokenizer(stored), None).render_conversation(
        read_conversation(Record({"messages": TURNS}, PLACE))
    )
    assert rendered == ours(name).render_conversation(read_conversation(Record({"messages": TURNS}, PLACE)))
