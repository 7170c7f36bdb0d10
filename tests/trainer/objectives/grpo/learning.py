"""GRPO on sums in one process: our engine learns, Transformers with the published weights answers.

Before, plain Transformers has taught the model to answer with a sum, right three times of five.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from builders import merge_sections
from moejob_api.derived import mismatch_correction
from moejob_api.documents import read_file
from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_api.models import catalog
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.loading import open_published_checkpoint
from moejob_trainer.data import tiny
from moejob_trainer.data.encoding import end_of_text
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.data.preparation import EncodingRecipe
from moejob_trainer.data.prompt_loader import PromptLoader
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.stages import build_stages
from moejob_trainer.megatron.topology import start_groups, stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement
from moejob_trainer.megatron.weights import load_pretrained
from moejob_trainer.model.architecture import read_architecture, trained_architecture
from moejob_trainer.model.pretrained import read_pretrained
from moejob_trainer.objectives.grpo.collecting import PromptSets, RolloutCollector
from moejob_trainer.objectives.grpo.objective import GroupRelativePolicyOptimization, GrpoSettings, StepServices
from moejob_trainer.objectives.grpo.rank_exchange import PeerRanks
from moejob_trainer.objectives.grpo.sampling import GroupSampler
from moejob_trainer.rewards.scorer import Scorer
from moejob_trainer.rollouts.interface import (
    Answer,
    FinishReason,
    Floats,
    GenerationRequest,
    SamplingParams,
    SyncReport,
    Tokens,
)
from moejob_trainer.training.learning_rate import learning_rate
from trainer.training_data import prompt_corpora

EXAMPLE = Path(__file__).parents[4] / "examples" / "tiny-grpo.yaml"
# What the model of the example learns, a smaller one learns in a fraction of the time.
SMALLER: dict[str, Any] = {
    "hidden_size": 64,
    # The least that vLLM computes on a CPU.
    "head_dim": 32,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_experts": 4,
}
TAUGHT = 150


@dataclass
class TransformersEngine:
    """A generator and publisher: requests that wait are answered together."""

    # With a config.json.
    folder: Path
    model: Any = None
    version: int = -1
    _waiting: list[tuple[GenerationRequest, asyncio.Future[Answer]]] = field(default_factory=list)

    @property
    def stacked_elements(self) -> int:
        """Each expert comes by itself."""
        return 0

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> SyncReport:
        """Let Transformers read the weights from files: it keeps experts in another shape than is published."""
        tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights}
        save_file(tensors, self.folder / "model.safetensors", {"format": "pt"})
        self.model, self.version = AutoModelForCausalLM.from_pretrained(self.folder).float().eval(), version
        return SyncReport(version, 0.0, 0, 0.0, 0.0, 1.0)

    def release(self) -> None:
        """Hold what there is."""

    async def wait_for_interruption(self) -> None:
        """It loses nothing."""
        await asyncio.Event().wait()

    def measure_idle_share(self) -> float:
        """It is never idle."""
        return 0.0

    async def generate(self, request: GenerationRequest, sampling: SamplingParams) -> Answer:
        """Return an answer, with whatever else is asked at the moment."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        await asyncio.sleep(0)
        waiting, self._waiting = self._waiting, []
        if waiting:
            answers = self._answers([one for one, _ in waiting], sampling)
            for (_, waiter), answer in zip(waiting, answers, strict=True):
                waiter.set_result(answer)
        return await future

    @torch.no_grad()
    def _answers(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Answer]:
        """Answer prompts of one length."""
        tokens = torch.from_numpy(np.stack([request.prompt for request in requests]).astype(np.int64))
        random = [np.random.default_rng(request.seed) for request in requests]
        log_probabilities = np.zeros((len(requests), sampling.max_new_tokens), np.float32)
        for place in range(sampling.max_new_tokens):
            every = (self.model(tokens, use_cache=False).logits[:, -1].double() / sampling.temperature).log_softmax(-1)
            points = torch.tensor([[one.random()] for one in random], dtype=torch.float64)
            drawn = torch.searchsorted(every.exp().cumsum(1), points).clamp(max=every.shape[1] - 1)
            log_probabilities[:, place] = every.gather(1, drawn)[:, 0].numpy()
            tokens = torch.cat([tokens, drawn], 1)
        answered = tokens[:, -sampling.max_new_tokens :].numpy().astype(np.int32)
        rows = zip(requests, answered, log_probabilities, strict=True)
        return [self._up_to_its_end(*row, sampling) for row in rows]

    def _up_to_its_end(
        self, request: GenerationRequest, tokens: Tokens, probable: Floats, sampling: SamplingParams
    ) -> Answer:
        ends = np.flatnonzero(np.isin(tokens, sampling.stop_tokens))
        count = int(ends[0]) + 1 if len(ends) else len(tokens)
        reason = FinishReason.STOP if len(ends) else FinishReason.LENGTH
        return Answer(request, tokens[:count], probable[:count], np.full(count, self.version, np.int32), reason)


def taught(seed: int, folder: Path) -> None:
    """Write a model that plain Transformers has taught the guesses that come along."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {**(catalog.find_config(tiny.TOKENIZER) or {}), **SMALLER}
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    tokenizer: Any = tiny.build_tokenizer()
    chats = [tokenizer.apply_chat_template(chat["messages"], return_dict=False) for chat in tiny.guess_records("train")]
    tokens = pad_sequence(
        [torch.tensor(chat) for chat in chats], batch_first=True, padding_value=tokenizer.pad_token_id
    )
    prompt = len(chats[0]) - 2
    is_answer = tokens[:, prompt:] != tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    for _ in range(TAUGHT):
        every = model(tokens[:, :-1]).logits[:, prompt - 1 :].log_softmax(-1)
        right = every.gather(-1, tokens[:, prompt:, None])[..., 0]
        optimizer.zero_grad()
        (-right[is_answer].mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_job_spec(folder: Path, seed: int, sign: float, staleness: int = 0) -> Spec:
    """Return the job of examples/tiny-grpo.yaml for another model, its reward multiplied by `sign`."""
    example = read_file(str(EXAMPLE)).spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    return Spec.model_validate_json(
        json.dumps(
            merge_sections(
                example,
                {
                    "model": {"source": str(folder)},
                    "data": {"seed": seed},
                    "training": {"seed": seed},
                    "grpo": {
                        "rewards": [{"name": "exact-match", "weight": sign}],
                        "rollout": {"staleness": staleness},
                    },
                },
            )
        )
    )


def learned(start: Path, seed: int, sign: float, folder: Path, staleness: int = 0) -> list[float]:
    """Return the share of right answers at each step of the example, from the model in `start`.

    The engine answers as soon as it is asked: with staleness, each step behind the first ones trains on answers that
    are as old as it allows.
    """
    use_cpu()
    asked = make_job_spec(start, seed, sign, staleness)
    groups = start_groups(layout_of(asked.parallelism, 8), asked.moe.dispatcher)
    try:
        return _learned(asked, folder, TrainingPlacement(groups, torch.device("cpu")))
    finally:
        stop_groups()


def _learned(asked: Spec, folder: Path, placement: TrainingPlacement) -> list[float]:
    engine = _engine(asked, placement)
    engines = TransformersEngine(folder)
    shutil.copy(Path(asked.model.source) / "config.json", folder)
    assert asked.grpo is not None
    recipe = EncodingRecipe(asked.model, asked.data)
    tokenizer = recipe.load_tokenizer()
    asker = GroupSampler(
        engines,
        Scorer(asked.grpo.rewards, asked.grpo.reward_failure),
        lambda tokens: str(tokenizer.decode([*tokens])),
        asked.training.seed,
    )
    sets = PromptSets(PromptLoader(prompt_corpora(folder, recipe, 12), asked.data))
    plan = batch_plan(asked, layout_of(asked.parallelism, 8), pad_token=0)
    right = []
    grpo = asked.grpo.model_copy(update={"mismatch": mismatch_correction(asked.grpo)})
    sampling = SamplingParams(grpo.temperature, grpo.top_p, grpo.max_new_tokens, (end_of_text(tokenizer),))
    with RolloutCollector(grpo, asker, sets, sampling, folder) as collector:
        settings, parts = (
            GrpoSettings(grpo, plan, 1, asked.training.seed),
            StepServices(PeerRanks(), engines, collector),
        )
        objective = GroupRelativePolicyOptimization(settings, parts)
        for step in range(asked.training.max_steps or 0):
            engine.begin_step(step)
            for batches in objective.updates(step, engine):
                engine.update(batches, objective.loss)
            right.append(objective.metrics()["reward/exact-match"])
            assert objective.metrics()["staleness"] == min(step, grpo.rollout.staleness)
    return right


def _engine(asked: Spec, placement: TrainingPlacement) -> MegatronTrainingEngine:
    found = read_pretrained(Path(asked.model.source), asked.model)
    model = trained_architecture(read_architecture(found.config), asked)
    stages = build_stages(model, asked, layout_of(asked.parallelism, 8), placement.groups, placement.device)
    load_pretrained(stages, open_published_checkpoint(found.folder, build_tensor_table(model.shape)), placement.groups)
    training = asked.training

    def rate(step: int) -> float:
        return learning_rate(step, training.max_steps or 1, training.optimizer, training.scheduler)

    return MegatronTrainingEngine(model, asked, stages, placement, rate)
