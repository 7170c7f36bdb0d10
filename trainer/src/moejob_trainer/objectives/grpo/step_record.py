"""A whole step as arrays from which others can compute it again: `tokens/step-N.safetensors` of the run folder.

samples/ shows people some answers as text. A step needs more: token ids, the engine's log-probabilities, and the
members of each update; docs/grpo.md names every array. Safetensors keeps each number to the bit, is smaller than text
of nine digits even without compression, and every program that reads the model can read it. A file has one step: it is
written once, at the step's end, and needs no other file. An answer of the file is a rollout of one row. Rank 0 alone
has a recorder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from moejob_api.derived import RECORDED_STEPS, balancing_method, has_frozen_router, mismatch_correction
from moejob_api.job import Spec
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.objectives.grpo.rollout_batch import RolloutBatch
from moejob_trainer.objectives.grpo.sampling import AnswerGroup, LeftOutReason, SampledGroups, ScoredAnswer
from moejob_trainer.rollouts.interface import FinishReason
from moejob_trainer.runtime.disk import Disk, explain_failure, replace_file
from moejob_trainer.training import UpdateResult

FOLDER, FORMAT = "tokens", "moejob-grpo-step-1"
# The outcomes of a group; `group.outcome` has their places here.
OUTCOMES = ("Learned", *LeftOutReason)
_NAME = re.compile(r"step-(\d+)\.safetensors")


@dataclass(frozen=True, slots=True, eq=False)
class ComputedStep:
    """The trainer's numbers of the answers of a step, and its updates."""

    batch: RolloutBatch
    # Of each token of each rollout.
    advantages: Sequence[Array]
    # Log-probabilities of all tokens, of the version that answered and of the reference model. [T]
    old: Array | None
    reference: Array | None
    # The rollouts of each update that was made, in the order in which their losses are summed.
    updates: list[Sequence[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepRecorder:
    """Writes the file of each step, and removes the files of old steps. `settings` are JSON texts."""

    folder: Path
    settings: Mapping[str, str]
    sampled: Callable[[], SampledGroups]

    def record_step(self, step: int, computed: ComputedStep, results: Sequence[UpdateResult]) -> None:
        """Write a step under the number of its line in the step log."""
        sampled = self.sampled()
        content = save(step_arrays(sampled, computed, results), self._file_metadata(step, sampled))
        folder, disk = self.folder / FOLDER, Disk()
        with explain_failure("recording the tokens of a step", folder):
            disk.make_folder(folder)
            replace_file(disk, folder / f"step-{step}.safetensors", content)
            for path in outdated_records(folder.iterdir(), step):
                disk.remove(path)

    def _file_metadata(self, step: int, sampled: SampledGroups) -> dict[str, str]:
        names = [*sampled.groups[0].answers[0].score.parts]
        labels = {"outcomes": json.dumps(OUTCOMES), "rewardNames": json.dumps(names)}
        return {"format": FORMAT, "step": str(step), **labels, **self.settings}


def outdated_records(paths: Iterator[Path], step: int) -> list[Path]:
    """Return the files of steps that are too old to keep."""
    name_matches = ((path, _NAME.fullmatch(path.name)) for path in paths)
    return [path for path, name_match in name_matches if name_match and int(name_match[1]) <= step - RECORDED_STEPS]


def step_arrays(
    sampled: SampledGroups, computed: ComputedStep, results: Sequence[UpdateResult]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of a step by name: trained groups first, in the order of their rollouts."""
    batch = computed.batch
    if len(batch.lengths) > len(batch.rewards):
        raise ValueError(
            f"a step has {len(batch.lengths)} rows in {len(batch.rewards)} rollouts, and a record one row of each; "
            "set recordTokens: false"
        )
    groups = [*sampled.groups, *(left_out_group.group for left_out_group in sampled.left_out_groups)]
    outcomes = [0] * len(sampled.groups) + [OUTCOMES.index(each.reason) for each in sampled.left_out_groups]
    return {
        "group.outcome": np.array(outcomes, np.uint8),
        **_group_arrays(groups),
        **_answer_arrays(groups),
        **_token_arrays([answer for group in groups for answer in group.answers]),
        **_computed_arrays(computed),
        **_update_arrays(computed.updates, results),
    }


def _group_arrays(groups: Sequence[AnswerGroup]) -> dict[str, Array]:
    prompts = [group.prompt.prompt.tokens for group in groups]
    return {
        "group.number": np.array([group.prompt.number for group in groups], np.int64),
        "group.promptLength": np.array([len(prompt) for prompt in prompts], np.int32),
        "prompt.tokens": np.fromiter(chain.from_iterable(prompts), np.int32),
    }


def _answer_arrays(groups: Sequence[AnswerGroup]) -> dict[str, Array]:
    answers = [(number, answer) for number, group in enumerate(groups) for answer in group.answers]
    return {
        "answer.group": np.array([number for number, _ in answers], np.int32),
        "answer.member": np.array([answer.answer.request.member for _, answer in answers], np.int32),
        "answer.seed": np.array([answer.answer.request.seed for _, answer in answers], np.int64),
        "answer.length": np.array([len(answer.answer.tokens) for _, answer in answers], np.int32),
        "answer.truncated": np.array(
            [answer.answer.finish_reason is FinishReason.LENGTH for _, answer in answers], np.uint8
        ),
        # The sum of rewards by their weights, less the penalty of a long answer; then each by itself.
        "answer.reward": np.array([answer.reward for _, answer in answers], np.float64),
        "answer.rewards": np.array([[*answer.score.parts.values()] for _, answer in answers], np.float64),
    }


def _token_arrays(answers: Sequence[ScoredAnswer]) -> dict[str, Array]:
    return {
        "token.id": np.concatenate([answer.answer.tokens for answer in answers]).astype(np.int32),
        "token.engine": np.concatenate([each.answer.log_probabilities for each in answers]).astype(np.float32),
        "token.version": np.concatenate([each.answer.versions for each in answers]).astype(np.int32),
    }


def _computed_arrays(computed: ComputedStep) -> dict[str, Array]:
    """Return the trainer's numbers of each token of the trained answers."""
    batch = computed.batch
    advantages = [
        values[mask > 0] for values, mask in zip(computed.advantages, batch.split_by_rollout(batch.mask), strict=True)
    ]
    log_probabilities = {"token.old": computed.old, "token.reference": computed.reference}
    return {
        "token.advantage": np.concatenate(advantages).astype(np.float32),
        **{
            name: np.concatenate(batch.split_answers(values)).astype(np.float32)
            for name, values in log_probabilities.items()
            if values is not None
        },
    }


def _update_arrays(updates: Sequence[Sequence[int]], results: Sequence[UpdateResult]) -> dict[str, Array]:
    if len(updates) != len(results):
        raise ValueError(f"a step planned {len(updates)} updates and made {len(results)}")
    return {
        "update.size": np.array([len(members) for members in updates], np.int32),
        "update.answers": np.fromiter(chain.from_iterable(updates), np.int32),
        "update.loss": np.array([result.loss for result in results], np.float64),
        "update.gradientNorm": np.array([result.gradient_norm for result in results], np.float64),
        "update.learningRate": np.array([result.learning_rate for result in results], np.float64),
        "update.applied": np.array([result.is_applied for result in results], np.uint8),
    }


def recorded_settings(spec: Spec) -> dict[str, str]:
    """Return the settings that a step is computed from, as JSON by section, without the addresses of rewards."""
    if spec.grpo is None:
        raise ValueError(f"method {spec.method} has no answers to record")
    sections = {
        "model": spec.model,
        "grpo": spec.grpo.model_copy(update={"rewards": (), "mismatch": mismatch_correction(spec.grpo)}),
        "training": spec.training,
        "moe": spec.moe,
    }
    texts = {name: section.model_dump_json(by_alias=True, exclude_none=True) for name, section in sections.items()}
    derived = {"routerIsFrozen": has_frozen_router(spec), "balancing": balancing_method(spec).value}
    return texts | {"derived": json.dumps(derived)}
