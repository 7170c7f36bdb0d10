"""Training and evaluation data of a run, prepared once for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from moejob_api.job.evaluations import loss_sets, prompt_sets, set_names
from moejob_trainer.data.blending import blended_dataset
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.hub import HubPins
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.data.preparation import FOLDER, EncodingRecipe, prepare_datasets
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.data.stream import BatchShare, TrainingData, batch_size, sample_count
from moejob_trainer.evaluation.answers import EvalPrompts, read_eval_prompts
from moejob_trainer.setup.context import RankContext
from moejob_trainer.setup.model import RunModel
from moejob_trainer.setup.prompts import answer_decoder, stop_tokens

_FOLDERS = TypeAdapter(tuple[str, ...])
_TOKENS = TypeAdapter(tuple[tuple[int, ...], ...])


@dataclass(frozen=True, slots=True)
class RunData:
    """The data of a run, and the share of each global batch that belongs to this data rank."""

    training: TrainingData
    # Held-out sets by their names.
    evaluation: list[tuple[str, Corpus]]
    prompts: EvalPrompts
    share: BatchShare
    total_steps: int


def load_data(context: RankContext, model: RunModel) -> RunData:
    """Load the data; the first rank tokenizes data sets that are not on the volume yet, for all ranks."""
    data, spec = context.spec.data, context.spec
    pins = HubPins(context.environment.folder)
    recipe = EncodingRecipe(
        model.pretrained.located,
        data,
        vocabulary=model.architecture.shape.vocabulary,
        pins=pins,
        report_share=context.heartbeat.report_share,
    )
    folder = context.environment.folder / FOLDER
    folder_names = context.on_first_rank(
        lambda: tuple(
            map(
                str,
                prepare_datasets(
                    [*data.train, *loss_sets(spec)], recipe, folder, workers=context.environment.ranks_per_node
                ),
            )
        ),
        _FOLDERS,
    )
    corpora = [Corpus(Path(path)) for path in folder_names]
    train_corpora, eval_corpora = corpora[: len(data.train)], corpora[len(data.train) :]
    blended = blended_dataset(train_corpora, data)
    training = TrainingData(train_corpora, blended, batch_size(spec), sample_count(blended, spec.training.epochs))
    share = BatchShare(batch_plan(spec, context.layout, pad_token=0), context.groups.data.rank)
    return RunData(
        training,
        [*zip(set_names(loss_sets(spec)), eval_corpora, strict=True)],
        _load_eval_prompts(context, model, recipe),
        share,
        spec.training.max_steps or training.count_steps(),
    )


def _load_eval_prompts(context: RankContext, model: RunModel, recipe: EncodingRecipe) -> EvalPrompts:
    """Read the prompts of evaluations on rank 0; what is wrong with them is every rank's failure."""
    spec, folder, records = context.spec, context.environment.folder, list[Prompt]()
    settings = spec.training.eval_answers
    if not prompt_sets(spec):
        return EvalPrompts(settings, (), (), (), lambda _: "", folder)

    def read_tokens() -> tuple[tuple[int, ...], ...]:
        records.extend(read_eval_prompts(spec, recipe))
        return tuple(prompt.tokens for prompt in records)

    tokens = context.on_first_rank(read_tokens, _TOKENS)
    return EvalPrompts(settings, tokens, stop_tokens(recipe, model), records, answer_decoder(recipe), folder)
