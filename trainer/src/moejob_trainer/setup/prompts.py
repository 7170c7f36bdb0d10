"""The prompts of a GRPO run, which rank 0 alone reads and sends to engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moejob_trainer.data.encoding import end_of_text
from moejob_trainer.data.end_tokens import published_end_tokens
from moejob_trainer.data.hub import HubPins
from moejob_trainer.data.preparation import FOLDER, EncodingRecipe
from moejob_trainer.data.prompt_corpus import PromptCorpus
from moejob_trainer.data.prompt_loader import PromptLoader, steps_of_epochs
from moejob_trainer.data.prompt_preparation import prepare_prompts
from moejob_trainer.data.prompts import read_prompts
from moejob_trainer.distributed.encoding import INTEGER
from moejob_trainer.objectives.grpo.collecting import PromptSets
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The prompts of a run, and its number of steps. Rank 0 alone has `sets`."""

    total_steps: int
    sets: PromptSets | None
    stop_tokens: tuple[int, ...]
    recipe: EncodingRecipe


def load_prompts(context: RankContext, model: RunModel) -> RunPrompts:
    """Prepare all prompts on rank 0; an error in them is raised on every rank."""
    spec, prompt_sets = context.spec, list[PromptSets]()
    if spec.grpo is None:
        raise ValueError("only GRPO has prompts")
    pins = HubPins(context.environment.folder)
    recipe = EncodingRecipe(
        model.pretrained.located,
        spec.data,
        vocabulary=model.architecture.shape.vocabulary,
        pins=pins,
        report_share=context.heartbeat.report_share,
    )
    # maxLength bounds prompt and answer together: 4096 - 1024 leaves 3072 tokens for a prompt.
    most_tokens = spec.data.max_length - spec.grpo.max_new_tokens

    def prepare_sets() -> int:
        folder, workers = context.environment.folder / FOLDER, context.environment.ranks_per_node
        prepared = prepare_prompts(spec.data.train, recipe, most_tokens, folder, workers)
        sources = [PromptCorpus(path) for path in prepared]
        eval_prompts = tuple(
            prompt for dataset in spec.data.eval for prompt in read_prompts(dataset, recipe, most_tokens)
        )
        prompt_sets.append(PromptSets(PromptLoader(sources, spec.data), eval_prompts))
        return sum(map(len, sources))

    count = context.on_first_rank(prepare_sets, INTEGER)
    steps = spec.training.max_steps or steps_of_epochs(count, spec.training.epochs or 1, spec.grpo.prompts_per_step)
    return RunPrompts(steps, prompt_sets[0] if prompt_sets else None, stop_tokens(recipe, model), recipe)


def answer_decoder(recipe: EncodingRecipe) -> Callable[[Sequence[int]], str]:
    """Return the function that turns the tokens of an answer into text."""
    tokenizer = recipe.load_tokenizer()
    return lambda tokens: str(tokenizer.decode([*tokens], skip_special_tokens=True))


def stop_tokens(recipe: EncodingRecipe, model: RunModel) -> tuple[int, ...]:
    """Return the tokens that end an answer: the tokenizer's, and those in the model's generation_config.json."""
    return tuple(sorted({end_of_text(recipe.load_tokenizer()), *published_end_tokens(model.pretrained.folder)}))
