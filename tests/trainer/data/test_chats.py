"""The loss mask of a conversation: by hand, against Transformers' own mask, and against TRL's marked templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import DataFormat, TrainedTurns
from moejob_trainer.data import tiny
from moejob_trainer.data.chat_template import ChatTemplate
from moejob_trainer.data.conversations import read_conversation
from moejob_trainer.data.encoding import RecordKind, Sample, build_encoder
from moejob_trainer.data.records import Record
from moejob_trainer.errors import BadData
from trainer.training_data import assistant, make_chat, user

CHAT = RecordKind(DataFormat.CHAT)
TEMPLATES = Path(__file__).parent / "templates"
UNMARKED = tiny.TEMPLATE.replace("{% generation %}", "").replace("{%- endgeneration %}", "")
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Łódź"}}}]}
TOOL_CHAT = {
    "messages": [user("is it sunny?"), CALL, {"role": "tool", "content": "yes"}, assistant("it is 🌞")],
    "tools": [WEATHER],
}
SYSTEM_CHAT = {
    "messages": [{"role": "system", "content": "be brief"}, *make_chat("hi", "hello", "bye", "see you")["messages"]]
}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda text: "<|" not in text)


def tokenizer(*special: str) -> PreTrainedTokenizerBase:
    """The tiny tokenizer, with the special tokens of another model beside its own."""
    found = tiny.build_tokenizer()
    found.add_special_tokens({"bos_token": "<|begin|>", "extra_special_tokens": list(special)})
    return found


def read_published_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def changed(name: str) -> str:
    """The same under a text that is not published."""
    return read_published_template(name) + "{# ours #}"


def encoded(
    fields: dict[str, Any], template: str | None = None, *special: str, turns: TrainedTurns = TrainedTurns.ALL
) -> tuple[PreTrainedTokenizerBase, Sample]:
    using = tokenizer(*special)
    kind = RecordKind(DataFormat.CHAT, turns)
    return using, build_encoder(kind, using, template)(Record(fields, "chats.jsonl, line 3"))


def trained_texts(
    fields: dict[str, Any], template: str | None = None, *special: str, turns: TrainedTurns = TrainedTurns.ALL
) -> list[str]:
    """The runs of tokens that are trained on, as text."""
    using, sample = encoded(fields, template, *special, turns=turns)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.trained_mask.astype(np.int8), [0]])))
    return [str(using.decode(sample.tokens[start:end])) for start, end in edges.reshape(-1, 2)]


def test_only_what_the_assistant_says_is_trained_on_and_the_end_of_it() -> None:
    using, sample = encoded(make_chat("3 + 4", "7", "say hello", "hello"))
    text = "<|user|>3 + 4<|end|><|assistant|>7<|end|><|user|>say hello<|end|><|assistant|>hello<|end|>"
    assert using.decode(sample.tokens) == text
    assert trained_texts(make_chat("3 + 4", "7", "say hello", "hello")) == ["7<|end|>", "hello<|end|>"]


def test_a_message_without_words_does_not_spread_to_its_neighbours() -> None:
    # Nothing stands between the two marks, though they stand within the token " is".
    template = "{% for m in messages %}<|user|>{{ m.content }} i{% generation %}{% endgeneration %}s{% endfor %}"
    with_end = template + "{% generation %}<|end|>{% endgeneration %}"
    assert trained_texts(make_chat("a", "b"), with_end) == ["<|end|>"]


def test_blanks_that_a_tokenizer_leaves_out_of_its_offsets_are_trained_on() -> None:
    using = tokenizer()
    using.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    template = "{% for m in messages %}<|user|>{% generation %}{{ m.content + '  ' }}{% endgeneration %}{% endfor %}"
    sample = build_encoder(CHAT, using, template)(Record(make_chat(" a", "b"), "chats.jsonl, line 3"))
    assert using.decode(sample.tokens[sample.trained_mask]) == " a  b  "


def test_a_tool_call_is_trained_on_and_its_answer_is_not() -> None:
    assert trained_texts(TOOL_CHAT) == [
        '<|call|>{"name": "weather", "arguments": {"city": "Łódź"}}<|end|>',
        "it is 🌞<|end|>",
    ]


def test_arguments_written_as_text_are_those_of_the_object() -> None:
    written = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}]}
    as_text = {**TOOL_CHAT, "messages": [user("is it sunny?"), written, *TOOL_CHAT["messages"][2:]]}
    assert trained_texts(as_text) == trained_texts(TOOL_CHAT)


WEIGHED_CHAT = {
    "messages": [
        *(user("a"), {**assistant("no"), "weight": 0}),
        *({**user("b"), "weight": 0.0}, {**assistant("yes"), "weight": 1}),
        *(user("c"), assistant("and this")),
    ]
}
BOTH_WAYS = pytest.mark.parametrize("template", [None, UNMARKED], ids=["marked", "derived"])


@BOTH_WAYS
def test_a_message_of_weight_0_is_read_and_not_trained_on(template: str | None) -> None:
    whole = {
        "messages": [
            {**message, "weight": 1} if message["role"] == "assistant" else message
            for message in WEIGHED_CHAT["messages"]
        ]
    }
    assert trained_texts(WEIGHED_CHAT, template) == ["yes<|end|>", "and this<|end|>"]
    assert encoded(WEIGHED_CHAT, template)[1].tokens.tolist() == encoded(whole, template)[1].tokens.tolist()


@BOTH_WAYS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(make_chat("a", "first", "b", "second"), ["second<|end|>"], id="an exchange"),
        pytest.param(
            {**TOOL_CHAT, "messages": [*make_chat("a", "b")["messages"], *TOOL_CHAT["messages"]]},
            ['<|call|>{"name": "weather", "arguments": {"city": "Łódź"}}<|end|>', "it is 🌞<|end|>"],
            id="a call and what is said of its answer",
        ),
        pytest.param(
            {"messages": [*make_chat("a", "first", "b", "second")["messages"], user("and?")]},
            ["second<|end|>"],
            id="a question left open",
        ),
        pytest.param(
            {"messages": [assistant("hi"), assistant("there")]}, ["hi<|end|>", "there<|end|>"], id="no question"
        ),
    ],
)
def test_of_the_last_turn_alone_all_that_the_assistant_says_is_trained_on(
    fields: dict[str, Any], expected: list[str], template: str | None
) -> None:
    assert trained_texts(fields, template, turns=TrainedTurns.LAST) == expected


def test_earlier_answers_that_a_template_changes_are_no_matter_where_the_last_turn_alone_is_trained_on() -> None:
    changing = UNMARKED.replace(
        "{{ message.content or '' }}", "{{ message.content }}{% if not loop.last %}!{% endif %}"
    )
    fields = make_chat("a", "first", "b", "second")
    with pytest.raises(BadData, match="message 2: the chat template writes this assistant message differently"):
        trained_texts(fields, changing)
    assert trained_texts(fields, changing, turns=TrainedTurns.LAST) == ["second<|end|>"]


def test_marks_that_do_not_say_which_message_they_are_of_are_refused() -> None:
    mark = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    twice = "{% for m in messages %}" + mark + mark + "{% endfor %}"
    with pytest.raises(BadData, match=r"line 3: the chat template marks 12 spans for 3 assistant messages"):
        encoded(WEIGHED_CHAT, twice)


def test_a_conversation_in_which_all_weighs_nothing_is_refused_with_the_place() -> None:
    with pytest.raises(BadData, match="line 3 has no assistant message that is trained on: trainedTurns is Last"):
        encoded({"messages": [user("a"), {**assistant("b"), "weight": 0}]}, turns=TrainedTurns.LAST)


@pytest.mark.parametrize(
    "fields", [TOOL_CHAT, SYSTEM_CHAT, make_chat("ÄÖ", "日本語 text")], ids=["tools", "system", "unicode"]
)
def test_without_marks_the_same_is_trained_on_as_with_them(fields: dict[str, Any]) -> None:
    _, marked = encoded(fields)
    _, derived = encoded(fields, UNMARKED)
    assert derived.tokens.tolist() == marked.tokens.tolist()
    assert derived.trained_mask.tolist() == marked.trained_mask.tolist()


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_the_mask_is_the_one_of_transformers(turns: list[tuple[str, str]]) -> None:
    fields = make_chat(*(text for turn in turns for text in turn))
    using, sample = encoded(fields)
    reference: Any = using.apply_chat_template(
        fields["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample.tokens.tolist() == reference["input_ids"]
    assert sample.trained_mask.tolist() == [bool(flag) for flag in reference["assistant_masks"]]


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_a_tokenizer_that_does_not_tell_characters_gives_the_same_mask(turns: list[tuple[str, str]]) -> None:
    record = Record(make_chat(*(text for turn in turns for text in turn)), "chats.jsonl, line 3")
    without_offsets: Any = Slow()
    fast, slow = (build_encoder(CHAT, using, None)(record) for using in (tokenizer(), without_offsets))
    assert (slow.tokens.tolist(), slow.trained_mask.tolist()) == (fast.tokens.tolist(), fast.trained_mask.tolist())


class Slow:
    """A tokenizer in Python, as models bring along: it knows no offsets."""

    is_fast = False

    def __init__(self) -> None:
        self._real = tokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, text: str, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._real(text, **options)


CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@pytest.mark.parametrize(
    ("name", "special", "fields"),
    [
        pytest.param("llama3", LLAMA, SYSTEM_CHAT, id="Llama 3, several turns"),
        pytest.param("qwen2_5", CHATML, SYSTEM_CHAT, id="Qwen 2.5, several turns"),
        pytest.param("qwen2_5", CHATML, TOOL_CHAT, id="Qwen 2.5, tools"),
        pytest.param("qwen3_instruct_2507", CHATML, SYSTEM_CHAT, id="Qwen 3 Instruct, several turns"),
        pytest.param("qwen3_instruct_2507", CHATML, TOOL_CHAT, id="Qwen 3 Instruct, tools"),
        pytest.param("qwen3", CHATML, make_chat("hi", "hello"), id="Qwen 3, one turn"),
    ],
)
def test_derived_masks_of_published_templates_are_those_of_their_marked_variants(
    name: str, special: tuple[str, ...], fields: dict[str, Any]
) -> None:
    derived = trained_texts(fields, read_published_template(name), *special)
    marked = trained_texts(fields, read_published_template(f"{name}_training"), *special)
    # TRL lets the assistant say the line break after the end of its turn, and with Qwen 2.5 the one that the prompt for
    # its answer already ends with.
    assert derived == [text.removesuffix("\n").removeprefix("\n") for text in marked]
    assert len(derived) == len([m for m in fields["messages"] if m["role"] == "assistant"])


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_derived_masks_of_llama_are_what_the_assistant_says(name: str) -> None:
    assert trained_texts(SYSTEM_CHAT, read_published_template(name), *LLAMA) == ["hello<|eot_id|>", "see you<|eot_id|>"]
    assert trained_texts(TOOL_CHAT, read_published_template(name), *LLAMA) == [
        '{"name": "weather", "parameters": {"city": "Łódź"}}<|eot_id|>',
        "it is 🌞<|eot_id|>",
    ]


@pytest.mark.parametrize(
    ("template", "fields", "said"),
    [
        pytest.param(
            changed("qwen3"),
            make_chat("a", "b", "c", "d"),
            "message 2: the chat template writes this",
            id="Qwen 3, turns",
        ),
        pytest.param(
            changed("deepseekv3"), make_chat("a", "b"), "message 2: the chat template writes", id="thinks first"
        ),
        pytest.param(
            changed("glm4moe"), make_chat("a", "b"), "message 2: .* without a special token", id="never stops"
        ),
        pytest.param(
            read_published_template("llama3"),
            TOOL_CHAT,
            "leaves out the tool weather",
            id="tools that the template does not know",
        ),
        pytest.param(
            "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}",
            SYSTEM_CHAT,
            r"leaves out the content of message 1 \(role system\)",
            id="a role that the template skips",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}",
            make_chat("a", "b"),
            "marks nothing as the assistant's",
            id="marks around nothing",
        ),
        pytest.param("{{ raise_exception('no') }}", make_chat("a", "b"), "the chat template fails: no", id="says no"),
        pytest.param("{% for %}", make_chat("a", "b"), "the chat template fails", id="is no template"),
        pytest.param(None, {"messages": [user("a")]}, "has no assistant message", id="nobody answers"),
    ],
)
def test_a_template_that_leaves_open_what_to_train_on_is_refused_with_the_place(
    template: str | None, fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadData, match=f"^chats.jsonl, line 3.*{said}"):
        encoded(fields, template, *CHATML, *LLAMA)


def test_a_tokenizer_without_a_template_says_where_to_put_one() -> None:
    bare = tiny.build_tokenizer()
    bare.chat_template = None
    with pytest.raises(BadData, match=r"give one as data\.chatTemplate"):
        ChatTemplate(bare, None)


MESSAGE = "chats.jsonl, line 3, message 1"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param({"conversations": []}, "line 3: there is no messages; found conversations", id="another field"),
        pytest.param({}, "line 3: there is no messages; found nothing", id="no field"),
        pytest.param({"messages": []}, r"messages is \[\]; expected a list of at least one", id="no message"),
        pytest.param({"messages": "hi"}, 'messages is "hi"; expected a list', id="text"),
        pytest.param({"messages": ["hi"]}, f'{MESSAGE} is "hi"; expected an object', id="a message that is text"),
        pytest.param({"messages": [{"role": "human", "content": "a"}]}, f'{MESSAGE} has the role "human"', id="role"),
        pytest.param({"messages": [{"content": "a"}]}, f"{MESSAGE} has the role absent", id="no role"),
        pytest.param({"messages": [{"role": "user"}]}, f"{MESSAGE} has the content absent", id="no content"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "list of parts of type text",
            id="an image",
        ),
        pytest.param(
            {"messages": [{**assistant("a"), "weight": 0.5}]},
            f"{MESSAGE} has the role assistant and the weight 0.5; expected 0",
            id="a weight between",
        ),
        pytest.param(
            {"messages": [{**user("a"), "weight": 1}]},
            f"{MESSAGE} has the role user and the weight 1",
            id="a user's weight",
        ),
        pytest.param({"messages": [{**assistant("a"), "tool_calls": "x"}]}, 'the tool_calls "x"', id="calls as text"),
        pytest.param({"messages": [{**assistant("a"), "tool_calls": [{}]}]}, "the tool call {}", id="an empty call"),
        pytest.param(
            {"messages": [{**assistant("a"), "tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "arguments of f are not JSON",
            id="arguments that are no JSON",
        ),
        pytest.param(
            {"messages": [{**assistant("a"), "tool_calls": [{"name": "f", "arguments": "3"}]}]},
            "arguments of f are 3; expected an object",
            id="arguments that are a number",
        ),
        pytest.param({**make_chat("a", "b"), "tools": "{"}, "line 3: tools are not JSON", id="tools that are no JSON"),
        pytest.param(
            {**make_chat("a", "b"), "tools": [1]}, r"tools is \[1\]; expected a list of func", id="tools as numbers"
        ),
    ],
)
def test_a_conversation_that_makes_no_sense_is_refused_with_the_place(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadData, match=said):
        read_conversation(Record(fields, "chats.jsonl, line 3"))
