"""GRPO as the loop sees it: a step publishes the weights, generates and scores answers, and updates on them.

Rank 0 asks the engines and the rewards; then every rank has the whole step as arrays and cuts its micro batches itself.

A worked step, with promptsPerStep 2, groupSize 3, epochsPerStep 2 and the defaults otherwise. A bar separates groups.

 1. Publish: the engines load the weights of this step, and a probe compares their log-probabilities with the trainer's.
 2. Prompts: rank 0 draws two, of 3 and 2 tokens.
 3. Groups: the engines sample three answers to each, and note the log-probability of every token.
        answer tokens    [2, 3]   2  1  2 | 1  1  1
 4. Rewards: each answer is scored as it arrives.
        rewards          [2, 3]   1  0  0 | 1  1  1
    The second group has no signal. It stays, because dynamicSampling is off.
 5. Rollouts: every rank receives them, each a prompt and its answer, one after another.
        lengths          [6]      5  4  5 | 3  3  3
        tokens, mask, log-probabilities of the engine [23]; the mask is 1 at the 8 tokens of answers, 0 at prompts.
 6. Advantages: (reward - mean of the group) / (deviation of the group + 1e-4), the same for all tokens of an answer.
        means            [2]      0.33333 | 1.00000
        deviations       [2]      0.57735 | 0.00000
        advantages       [2, 3]   1.15450  -0.57725  -0.57725 | 0.00000  0.00000  0.00000
 7. Old log-probabilities [23]: the trainer's own, before the first of several updates.
 8. Updates: each epoch makes one of all six rollouts, packed into micro batches; every answer token weighs 1.
 9. Ratios: exp(new - old). They are 1 in the first epoch. Say its update changed the first group's 5 tokens to
        ratios           [5]      1.5  1.1  0.7  0.9  1.3
10. Loss of each token: -min(ratio A, clip(ratio, 0.8, 1.2) A), with A the advantage.
        first epoch      [5]      -1.15450  -1.15450  0.57725  0.57725  0.57725
        second epoch     [5]      -1.38540  -1.26995  0.46180  0.51953  0.75043
    1.5 and 0.7 are clipped: those tokens have moved far enough, and get no gradient. 1.3 is not: the token became
    likelier, and its answer is worse than the others.
11. Aggregation (Token): the weighted sum over all ranks, divided by the weight of 8 tokens.
        first epoch      []       -0.57725 / 8 = -0.07216
        second epoch     []       -0.92360 / 8 = -0.11545
    Sequence would take the mean of each answer, then of the six: -0.03848 in the second epoch.
12. Each update ends with a step of the optimizer; the next step of training publishes the result.

Where each of them is: 1 rollouts/publisher.py; 2 data/prompt_loader.py; 3 collecting.py, with group_queue.py and
sampling.py; 4 rewards/scorer.py; 5 and 7 rollout_batch.py; 6 advantages.py; 8 data/packing.py; 9 to 11 loss.py;
12 megatron/training_engine.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Protocol, TypeVar

import torch

from moejob_api.derived import needs_old_probabilities
from moejob_api.job.grpo import Grpo
from moejob_trainer.data.packing import BatchPlan, build_rank_batch
from moejob_trainer.distributed.encoding import Array
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.objectives import ObjectiveState, StoppedWaiting
from moejob_trainer.objectives.grpo import rollout_batch
from moejob_trainer.objectives.grpo.loss import build_loss_mask, engine_mismatch, grpo_loss
from moejob_trainer.objectives.grpo.rank_exchange import PeerRanks
from moejob_trainer.objectives.grpo.rollout_batch import RolloutBatch
from moejob_trainer.objectives.grpo.step_record import ComputedStep, StepRecorder
from moejob_trainer.objectives.grpo.waiting import WaitingLog
from moejob_trainer.rollouts.interface import EnginesLost, SyncReport, WeightPublisher, WrongWeights
from moejob_trainer.runtime.user_lines import to_stderr
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, TrainingEngine, UpdateResult

T = TypeVar("T")
# Publications of the same weights, one after another, before a run gives up on engines that are lost each time.
_PUBLICATIONS = 5
_GENERATE, _LEARN = "generateSeconds", "learnSeconds"


class RolloutSource(Protocol):
    """Rank 0's source of rollouts, which knows engines, prompts and rewards.

    A method that asks engines returns None once they have lost the weights. The caller publishes the weights again and
    calls the method again, which keeps the answers that it already has.
    """

    def collect_rollouts(self, step: int) -> RolloutBatch | None:
        """Return the rollouts of a step."""

    def evaluate(self) -> Mapping[str, float] | None:
        """Return the numbers of an evaluation."""

    def give_up_request(self) -> None:
        """Take nothing of a request that is under way: its groups are those of a later step."""

    def log_samples(self, step: int, advantages: Sequence[float]) -> None:
        """Note the mean advantage of each answer's tokens."""

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of the last step."""

    def measure_idle_share(self) -> float:
        """Return the share of time since the last call in which engines had nothing to compute."""

    def snapshot_state(self) -> ObjectiveState:
        """Return the place in the prompts."""

    def load_state(self, state: ObjectiveState) -> None:
        """Continue behind that place."""


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """The settings that decide a step."""

    grpo: Grpo
    plan: BatchPlan
    # Parts that the answers are cut into, each an update in every epoch.
    updates: int
    seed: int


@dataclass(frozen=True, slots=True)
class StepServices:
    """The services that a step uses. `rollouts` and `recorder` are rank 0's; `waiting_heartbeat` beats in waits.

    All ranks call `has_agreed_to_stop` together. It is asked where engines have not done what a step needs, so a run
    that is asked to stop saves at once, and does not wait for engines or answers that may take hours.
    """

    peers: PeerRanks
    publisher: WeightPublisher
    rollouts: RolloutSource | None
    waiting_heartbeat: Callable[[int], AbstractContextManager[object]] = lambda _: nullcontext()
    recorder: StepRecorder | None = None
    has_agreed_to_stop: Callable[[], bool] = lambda: False


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of each phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def time_phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        began_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began_at


class GroupRelativePolicyOptimization:
    """The objective."""

    def __init__(self, settings: GrpoSettings, services: StepServices) -> None:
        self.settings, self.services, self._grpo = settings, services, settings.grpo
        self._phases, self._sync = PhaseTimes(), SyncReport(0, 0.0, 0, 0.0, 0.0, 0.0)
        # The largest mismatch on this rank in the step. It stays on the device: reading it would wait for the GPU.
        self._mismatch: torch.Tensor | None = None
        # Tokens that went through the updates of the step, on all ranks.
        self._tokens = 0
        self._metrics: Mapping[str, float] = {}
        self._computed_step: ComputedStep | None = None
        self._waiting_log = WaitingLog(self._grpo.rollout)

    def updates(self, step: int, engine: TrainingEngine) -> Iterator[Sequence[MicroBatch]]:
        """Yield this data rank's micro batches of each update."""
        self._phases, self._mismatch, self._tokens = PhaseTimes(), None, 0
        batch = self._collect_batch(step, engine)
        with self._phases.time_phase("outputsSeconds"):
            old, reference = self._compute_log_probabilities(batch, engine)
        advantages = rollout_batch.compute_token_advantages(self._grpo, batch, old, reference)
        self._log_samples(step, batch, advantages)
        self._computed_step = ComputedStep(batch, advantages, old, reference)
        loss_inputs = rollout_batch.build_loss_inputs(batch, advantages, old, reference)
        seed, update_count = (self.settings.seed, step), self.settings.updates
        has_update = False
        for members in rollout_batch.plan_updates(batch.group_of_rollout, self._grpo, update_count, seed):
            documents = rollout_batch.build_documents(self._grpo, batch, members, loss_inputs)
            # overlong.filter may leave an update without any weight; an optimizer step on it would still move weights.
            if any(document.loss_weight for document in documents):
                has_update = True
                self._computed_step.updates.append(members)
                self._tokens += sum(len(document.tokens) for document in documents)
                with self._phases.time_phase(_LEARN):
                    yield build_rank_batch(documents, self.settings.plan, self.services.peers.data.rank)
        if not has_update:
            raise BadConfiguration(
                f"step {step + 1} has {len(batch.rewards)} answers and none has an end, so overlong.filter leaves "
                "nothing to learn from; raise maxNewTokens, or set overlong.filter: false"
            )
        self._update_metrics()

    def record_step(self, step: int, results: Sequence[UpdateResult]) -> None:
        """Record a step under its number in the step log once its updates are made, where the job asks for it."""
        if self.services.recorder is not None and self._computed_step is not None:
            self.services.recorder.record_step(step, self._computed_step, results)
        self._computed_step = None

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        """Return the weighted sum of a micro batch's losses."""
        with torch.no_grad():
            largest = engine_mismatch(outputs, batch).where(build_loss_mask(batch).mask, 0).amax()
            self._mismatch = largest if self._mismatch is None else torch.maximum(self._mismatch, largest)
        return grpo_loss(self._grpo, outputs, batch)

    def evaluate(self, step: int, engine: TrainingEngine) -> Mapping[str, float]:
        """Return the metrics of the evaluation data, generated with the weights of that step."""
        rollouts = self.services.rollouts
        with self.services.waiting_heartbeat(step):
            self._publish_weights(step, engine)
            metrics = self._ask_engines(step, engine, None if rollouts is None else rollouts.evaluate)
            self.services.publisher.release()
        # Rank 0 alone reports the numbers; the other ranks have only waited.
        return {} if metrics is None else metrics

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last step, without those of its updates."""
        return self._metrics

    def waited_seconds(self) -> float:
        """Return the seconds that the last step waited for its data: for answers and their rewards."""
        return self._phases.seconds.get(_GENERATE, 0.0)

    def snapshot_state(self) -> ObjectiveState:
        """Return the place in the prompts, which rank 0 alone knows."""
        return ObjectiveState({}) if self.services.rollouts is None else self.services.rollouts.snapshot_state()

    def load_state(self, state: ObjectiveState) -> None:
        """Continue behind the last prompt that engines answered."""
        if self.services.rollouts is not None:
            self.services.rollouts.load_state(state)

    def _collect_batch(self, step: int, engine: TrainingEngine) -> RolloutBatch:
        rollouts = self.services.rollouts
        # Heartbeats continue, however long engines and rewards take: a rank that waits does not hang.
        with self.services.waiting_heartbeat(step):
            with self._phases.time_phase("syncSeconds"):
                self._sync = self._publish_weights(step, engine)
            with self._phases.time_phase(_GENERATE):
                batch = self._ask_engines(
                    step, engine, None if rollouts is None else partial(rollouts.collect_rollouts, step)
                )
                arrays = self.services.peers.broadcast_arrays(None if batch is None else batch_arrays(batch))
            with self._phases.time_phase("releaseSeconds"):
                self.services.publisher.release()
        return RolloutBatch(**arrays)

    def _ask_engines(self, step: int, engine: TrainingEngine, request: Callable[[], T | None] | None) -> T | None:
        """Return the reply of engines on rank 0, None elsewhere; publish the weights again when engines lose them."""
        while not self.services.peers.broadcast_flag((reply := None if request is None else request()) is not None):
            self.services.publisher.release()
            self._end_wait_if_stopping()
            self._log_line(f"no engine has the weights of step {step} any more; they are given to them again")
            self._sync = self._publish_weights(step, engine)
        return reply

    def _publish_weights(self, step: int, engine: TrainingEngine) -> SyncReport:
        publisher, were_wrong = self.services.publisher, False
        for _ in range(_PUBLICATIONS - 1):
            try:
                return publisher.publish(step, engine.export_weights(publisher.stacked_elements))
            except (EnginesLost, WrongWeights) as failure:
                # Two wrong publications in a row are no accident, and another start of the job would repeat them.
                if isinstance(failure, WrongWeights) and were_wrong:
                    raise
                were_wrong |= isinstance(failure, WrongWeights)
                lost = failure
            publisher.release()
            self._end_wait_if_stopping()
            self._log_line(f"the weights of step {step} are published once more: {lost}")
        return publisher.publish(step, engine.export_weights(publisher.stacked_elements))

    def _end_wait_if_stopping(self) -> None:
        """Raise StoppedWaiting on every rank if the run is asked to stop. The step has taken no group then."""
        if not self.services.has_agreed_to_stop():
            return
        if self.services.rollouts is not None:
            self.services.rollouts.give_up_request()
        raise StoppedWaiting

    def _log_line(self, line: str) -> None:
        if self.services.peers.is_first:
            to_stderr(line)

    def _compute_log_probabilities(
        self, batch: RolloutBatch, engine: TrainingEngine
    ) -> tuple[Array | None, Array | None]:
        """Return the log-probabilities of all tokens by trainer and reference model, None where not needed."""
        kl, share = self._grpo.kl, None
        needs_old = needs_old_probabilities(self._grpo, self.settings.updates * self._grpo.epochs_per_step)
        old = reference = None
        if needs_old or kl.coefficient > 0:
            share = rollout_batch.build_rollout_share(batch, self.settings.plan, self.services.peers.data.rank)
        if share is not None and needs_old:
            old = self.services.peers.sum_over_ranks(
                share.gather_log_probabilities(engine.compute_outputs(share.batches))
            )
        if share is not None and kl.coefficient > 0:
            reference = self.services.peers.sum_over_ranks(
                share.gather_log_probabilities(engine.compute_reference_outputs(share.batches))
            )
        return old, reference

    def _log_samples(self, step: int, batch: RolloutBatch, advantages: Sequence[Array]) -> None:
        if self.services.rollouts is not None:
            masks = batch.split_by_rollout(batch.mask)
            means = [float(value[mask > 0].mean()) for value, mask in zip(advantages, masks, strict=True)]
            self.services.rollouts.log_samples(step, means)

    def _update_metrics(self) -> None:
        """Gather the metrics of the step on all ranks: only last pipeline stages have measured mismatches."""
        largest = self.services.peers.max_over_ranks(0.0 if self._mismatch is None else float(self._mismatch))
        rollout_metrics = {} if self.services.rollouts is None else dict(self.services.rollouts.metrics())
        seconds = self._phases.seconds
        step_seconds = sum(seconds.values())
        if "generatedTokens" in rollout_metrics:
            # Engines that run ahead generate in all phases of a step.
            generation_seconds = step_seconds if self._grpo.rollout.staleness else seconds[_GENERATE]
            rollout_metrics["generationTokensPerSecond"] = rollout_metrics["generatedTokens"] / generation_seconds
            self._note_waiting(rollout_metrics, seconds[_GENERATE] / step_seconds)
        self._metrics = {
            **rollout_metrics,
            "trainingTokensPerSecond": self._tokens / seconds[_LEARN],
            **{name: round(phase_seconds, 6) for name, phase_seconds in seconds.items()},
            "mismatchMaximum": largest,
            "syncBytes": float(self._sync.size_bytes),
            "probeMean": self._sync.probe_mean,
            "probeMaximum": self._sync.probe_maximum,
            "probeBound": self._sync.probe_bound,
        }

    def _note_waiting(self, rollout_metrics: dict[str, float], trainer_share: float) -> None:
        if self.services.rollouts is None:
            return
        engine_share = self.services.rollouts.measure_idle_share()
        rollout_metrics |= {"trainerWaitShare": trainer_share, "engineWaitShare": engine_share}
        line = self._waiting_log.add_step(trainer_share, engine_share)
        if line is not None:
            self._log_line(line)


def batch_arrays(batch: RolloutBatch) -> dict[str, Array]:
    """Return the arrays of a step by name."""
    # Fields alone: what a batch has computed about itself, every rank computes from them.
    arrays = {each.name: getattr(batch, each.name) for each in fields(batch)}
    return {name: values for name, values in arrays.items() if values is not None}
