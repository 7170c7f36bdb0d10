"""Prompts for GRPO and evaluations: the tokens that the model reads, and the fields that a reward needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import DataFormat, Dataset, OverlongSamples
from moejob_trainer.data.chat_template import ChatTemplate
from moejob_trainer.data.conversations import Conversation, Message, read_conversation, require_field, require_text
from moejob_trainer.data.encoding import opening_tokens, token_ids
from moejob_trainer.data.preparation import EncodingRecipe
from moejob_trainer.data.records import Record
from moejob_trainer.data.sources import read_records
from moejob_trainer.errors import BadData


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as the model reads it."""

    tokens: tuple[int, ...]
    text: str
    # Every other field of the record (`answer` among them), for rewards.
    fields: Mapping[str, object]
    place: str
    # As they were before the chat template; None where the prompt was text.
    messages: Sequence[Message] | None = None


def read_prompts(dataset: Dataset, recipe: EncodingRecipe, most_tokens: int) -> tuple[Prompt, ...]:
    """Return all prompts of an evaluation, which needs them at once; most_tokens is data.maxLength less the answer.

    Text is a prompt as it is; messages are put through the chat template up to where the assistant answers.
    """
    refuse_unusable_prompts(dataset, recipe, most_tokens)
    tokenizer = recipe.load_tokenizer()
    all_prompts = [
        read_prompt(record, tokenizer, recipe) for record in read_records(dataset, recipe.claims, recipe.pins)
    ]
    kept_prompts = tuple(prompt for prompt in all_prompts if can_ask_prompt(prompt, most_tokens, recipe.data.overlong))
    refuse_no_prompts(dataset, len(all_prompts), len(kept_prompts), most_tokens)
    return kept_prompts


def refuse_unusable_prompts(dataset: Dataset, recipe: EncodingRecipe, most_tokens: int) -> None:
    """Raise BadData for a data set that cannot give any prompt."""
    if dataset.format is not DataFormat.PROMPTS:
        raise BadData(f"data set {dataset.source} has the format {dataset.format}; GRPO needs Prompts")
    if most_tokens < 1:
        raise BadData(f"data.maxLength {recipe.data.max_length} leaves no room for a prompt; it holds the answer too")


def refuse_no_prompts(dataset: Dataset, found_count: int, kept_count: int, most_tokens: int) -> None:
    """BadData where no prompt of a data set is left."""
    if not kept_count:
        raise BadData(
            f"data set {dataset.source} (split {dataset.split}) has {found_count} prompts, and none of at most "
            f"{most_tokens} tokens; raise data.maxLength or lower maxNewTokens"
        )


def can_ask_prompt(prompt: Prompt, most_tokens: int, overlong: OverlongSamples) -> bool:
    """Return whether a prompt is asked; BadData where data.overlong does not let it be dropped."""
    length = len(prompt.tokens)
    if length <= most_tokens:
        return True
    if overlong is OverlongSamples.DROP:
        return False
    raise BadData(
        f"{prompt.place} is a prompt of {length} tokens, room is for {most_tokens} and data.overlong is {overlong}, "
        "but a prompt without its end asks nothing; set overlong to Drop, or raise data.maxLength"
    )


def read_prompt(record: Record, tokenizer: PreTrainedTokenizerBase, recipe: EncodingRecipe) -> Prompt:
    """Return the prompt of one record."""
    messages: Sequence[Message] | None = None
    if isinstance(require_field(record, "prompt"), str):
        prompt_text = require_text(record, "prompt")
        tokens = [*opening_tokens(tokenizer), *token_ids(tokenizer, prompt_text)]
    else:
        chat = read_conversation(record, "prompt")
        prompt_text, messages = _render_prompt(chat, tokenizer, recipe), chat.messages
        tokens = token_ids(tokenizer, prompt_text)
    _refuse_unknown_tokens(tokens, record, recipe)
    other_fields = {key: value for key, value in record.fields.items() if key not in {"prompt", "tools"}}
    return Prompt(tuple(tokens), prompt_text, other_fields, record.place, messages)


def _render_prompt(chat: Conversation, tokenizer: PreTrainedTokenizerBase, recipe: EncodingRecipe) -> str:
    if chat.messages[-1]["role"] == "assistant":
        raise BadData(f"{chat.place}: the last message of the prompt is the assistant's; it must be answered by one")
    return ChatTemplate(tokenizer, recipe.data.chat_template).render_prompt(chat)


def _refuse_unknown_tokens(tokens: Sequence[int], record: Record, recipe: EncodingRecipe) -> None:
    if not tokens:
        raise BadData(f"{record.place}: the prompt has no tokens")
    if recipe.vocabulary is not None and max(tokens) >= recipe.vocabulary:
        raise BadData(
            f"{record.place} has the token {max(tokens)}, and the model {recipe.model.source} knows "
            f"{recipe.vocabulary}; tokenizer and model do not belong together"
        )
