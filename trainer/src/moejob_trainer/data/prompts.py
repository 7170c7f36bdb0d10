"""Prompts for GRPO and evaluations: the tokens that the model reads, and the fields that a reward needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import DataFormat, Dataset, Overlong
from moejob_trainer.data.chat_template import Template
from moejob_trainer.data.conversations import Conversation, Message, conversation, field, text
from moejob_trainer.data.encoding import ids, opening
from moejob_trainer.data.preparation import Recipe
from moejob_trainer.data.records import Record
from moejob_trainer.data.sources import records
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


def prompts(dataset: Dataset, recipe: Recipe, most_tokens: int) -> tuple[Prompt, ...]:
    """Return all prompts of an evaluation, which needs them at once; most_tokens is data.maxLength less the answer.

    Text is a prompt as it is; messages are put through the chat template up to where the assistant answers.
    """
    refuse_unasked(dataset, recipe, most_tokens)
    using = recipe.tokenizer()
    found = [read_prompt(record, using, recipe) for record in records(dataset, recipe.claims, recipe.pins)]
    kept = tuple(prompt for prompt in found if fits(prompt, most_tokens, recipe.data.overlong))
    refuse_none(dataset, len(found), len(kept), most_tokens)
    return kept


def refuse_unasked(dataset: Dataset, recipe: Recipe, most_tokens: int) -> None:
    """Raise BadData for a data set that cannot give any prompt."""
    if dataset.format is not DataFormat.PROMPTS:
        raise BadData(f"data set {dataset.source} has the format {dataset.format}; GRPO needs Prompts")
    if most_tokens < 1:
        raise BadData(f"data.maxLength {recipe.data.max_length} leaves no room for a prompt; it holds the answer too")


def refuse_none(dataset: Dataset, found: int, kept: int, most_tokens: int) -> None:
    """BadData where no prompt of a data set is left."""
    if not kept:
        raise BadData(
            f"data set {dataset.source} (split {dataset.split}) has {found} prompts, and none of at most "
            f"{most_tokens} tokens; raise data.maxLength or lower maxNewTokens"
        )


def fits(prompt: Prompt, most_tokens: int, overlong: Overlong) -> bool:
    """Return whether a prompt is asked; BadData where data.overlong does not let it be dropped."""
    length = len(prompt.tokens)
    if length <= most_tokens:
        return True
    if overlong is Overlong.DROP:
        return False
    raise BadData(
        f"{prompt.place} is a prompt of {length} tokens, room is for {most_tokens} and data.overlong is {overlong}, "
        "but a prompt without its end asks nothing; set overlong to Drop, or raise data.maxLength"
    )


def read_prompt(record: Record, using: PreTrainedTokenizerBase, recipe: Recipe) -> Prompt:
    """Return the prompt of one record."""
    messages: Sequence[Message] | None = None
    if isinstance(field(record, "prompt"), str):
        written = text(record, "prompt")
        tokens = [*opening(using), *ids(using, written)]
    else:
        asked = conversation(record, "prompt")
        written, messages = _rendered(asked, using, recipe), asked.messages
        tokens = ids(using, written)
    _refuse_strangers(tokens, record, recipe)
    others = {key: value for key, value in record.fields.items() if key not in {"prompt", "tools"}}
    return Prompt(tuple(tokens), written, others, record.place, messages)


def _rendered(asked: Conversation, using: PreTrainedTokenizerBase, recipe: Recipe) -> str:
    if asked.messages[-1]["role"] == "assistant":
        raise BadData(f"{asked.place}: the last message of the prompt is the assistant's; it must be answered by one")
    return Template(using, recipe.data.chat_template).prompt(asked)


def _refuse_strangers(tokens: Sequence[int], record: Record, recipe: Recipe) -> None:
    if not tokens:
        raise BadData(f"{record.place}: the prompt has no tokens")
    if recipe.vocabulary is not None and max(tokens) >= recipe.vocabulary:
        raise BadData(
            f"{record.place} has the token {max(tokens)}, and the model {recipe.model.source} knows "
            f"{recipe.vocabulary}; tokenizer and model do not belong together"
        )
