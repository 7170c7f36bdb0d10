"""The engine on Megatron: adapts its schedules, buffers and groups to what the loop asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_api.cost.estimate import model_flops
from moejob_api.job.job import Spec
from moejob_api.job.moe import Balancing
from moejob_api.memory.share import router_is_frozen
from moejob_trainer.batches import MicroBatch
from moejob_trainer.conversion.families import table
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.engine import Loss, LossTerms, Mean, TokenOutputs, UpdateResult
from moejob_trainer.groups import Groups, total
from moejob_trainer.layers.routing import updated_selection_bias
from moejob_trainer.megatron.gradients import finish_gradients
from moejob_trainer.megatron.measures import Measures
from moejob_trainer.megatron.optimizer import ShardedAdamW, moments
from moejob_trainer.megatron.pipeline import forward_backward, row_input, whole
from moejob_trainer.megatron.replicas import replicas
from moejob_trainer.megatron.weights import merged_weights, model_groups
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.balancing import Balance, GlobalBatch
from moejob_trainer.model.mixture import Mixture
from moejob_trainer.model.stage import RowInput, Said, Stage
from moejob_trainer.objectives.further import further_tokens


class Diverged(RuntimeError):
    """The gradient was not finite several times in a row."""


# One bad batch is survived; a model that no longer computes is not.
_MOST_SKIPPED = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the engine runs."""

    groups: Groups
    device: torch.device
    # All ranks, for words; None for a rank that is alone.
    control: dist.ProcessGroup | None = None

    @property
    def model_groups(self) -> ModelGroups:
        """The groups that divide parameters, as conversion wants them."""
        return model_groups(self.groups, self.control)


class MegatronEngine:
    """A model spread over ranks by Megatron's groups. `learning_rate` says the rate of the n-th update."""

    def __init__(
        self,
        model: Architecture,
        spec: Spec,
        stages: Sequence[Stage],
        placement: Placement,
        learning_rate: Callable[[int], float],
    ) -> None:
        self.model, self.spec, self.stages = model, spec, [*stages]
        self.placement, self.groups, self.device = placement, placement.groups, placement.device
        self.learning_rate = learning_rate
        self.measures = Measures(model, spec.moe, self.stages, placement.groups, placement.device)
        self.updates = 0
        self._skipped = 0
        # The last loss that was asked for, whether forward only, and the names of what it measures.
        self._told: tuple[tuple[Loss, bool], list[str]] | None = None
        self._freeze()
        self.replicas = replicas(self.stages, spec)
        training = spec.training
        kept = moments(training.precision.moments, spec.memory.offload_optimizer)
        self.optimizer = ShardedAdamW(self.replicas, self.groups, training.optimizer, kept)

    # --- what the loop asks for ------------------------------------------------------------------------------------

    def update(self, batches: Sequence[MicroBatch], loss: Loss) -> UpdateResult:
        """One update of the weights from this data rank's micro batches of a global batch."""
        self.replicas.begin()
        result = self._run(batches, loss, forward_only=False)
        finish_gradients(self.stages, self.replicas, self.groups)
        norm = self.optimizer.gradient_norm()
        rate = self.learning_rate(self.updates)
        is_applied = math.isfinite(norm) and math.isfinite(result.loss)
        if is_applied:
            self.optimizer.update(rate, self._clipping(norm))
            self._move_selection_bias()
        self._count(is_applied, norm, result.loss)
        return replace(result, gradient_norm=norm, learning_rate=rate, is_applied=is_applied)

    def evaluated(self, batches: Sequence[MicroBatch], loss: Loss) -> UpdateResult:
        """The loss without an update."""
        with torch.no_grad():
            return self._run(batches, loss, forward_only=True)

    def outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """What the model says now about each micro batch; every rank of a data rank gets all of it."""
        found: dict[int, TokenOutputs] = {}

        def kept(number: int, outputs: TokenOutputs, _: MicroBatch) -> Tensor:
            found[number] = outputs
            return outputs.log_probabilities.sum()

        with torch.no_grad():
            self._through_stages([self._here(batch) for batch in batches], kept, forward_only=True)
        return [self._from_last_stage(found.get(number), batch) for number, batch in enumerate(batches)]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, whole and one at a time, each on one rank."""
        return hugging_face_tensors(merged_weights(self.stages), table(self.model.shape), self.placement.model_groups)

    # --- a global batch ---------------------------------------------------------------------------------------------

    def _run(self, batches: Sequence[MicroBatch], loss: Loss, *, forward_only: bool) -> UpdateResult:
        here = [self._here(batch) for batch in batches]
        totals = self._totals(here)
        weight = totals.weight
        if not forward_only:
            self._begin_balancing(GlobalBatch(len(batches), totals.micro_batches))
        sums = _Sums()

        def finished(_: int, outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
            terms, further = loss(outputs, batch), further_tokens(outputs, batch)
            sums.add(replace(terms, metrics={**terms.metrics, **further.metrics}))
            return (terms.total + self.spec.training.mtp_loss_coefficient * further.total) / weight

        self._through_stages(here, finished, forward_only=forward_only)
        means = self._means(sums.values, self._names((loss, forward_only), sums.values))
        if not forward_only:
            means |= self.measures.of()
        return UpdateResult(
            loss=means.pop("loss", 0.0) / weight,
            gradient_norm=0.0,
            learning_rate=0.0,
            tokens=totals.tokens,
            flops=totals.tokens * model_flops(self.model.shape, totals.document_tokens),
            metrics=means,
        )

    def _through_stages(
        self,
        batches: Sequence[MicroBatch],
        finish: Callable[[int, TokenOutputs, MicroBatch], Tensor],
        *,
        forward_only: bool,
    ) -> None:
        def finished(number: int, said: Said) -> Tensor:
            log_probabilities, entropy, *further = (
                whole(values, self.groups) for values in (said.log_probabilities, said.entropy, *said.further)
            )
            return finish(number, TokenOutputs(log_probabilities, entropy, tuple(further)), batches[number])

        rows = [self._row_input(number, batch) for number, batch in enumerate(batches)]
        forward_backward(self.replicas.chunks, rows, finished, forward_only=forward_only)
        self.replicas.rest()

    def _row_input(self, number: int, batch: MicroBatch) -> RowInput:
        sequence_parallel = self.spec.parallelism.sequence_parallel
        made = row_input(batch, self.model, self.groups, sequence_parallel=sequence_parallel)
        return replace(made, row=replace(made.row, number=number, update=self.updates))

    def _totals(self, batches: Sequence[MicroBatch]) -> _Totals:
        """Known before the backward pass, so that no layout changes the loss."""
        weight = sum(float(batch.weights.double().sum()) for batch in batches)
        tokens = sum(sum(batch.lengths) for batch in batches)
        filled = sum(any(batch.lengths) for batch in batches)
        squares = sum(length * length for batch in batches for length in batch.lengths)
        totals = torch.tensor([weight, tokens, filled, squares], dtype=torch.float64, device=self.device)
        weight, tokens, filled, squares = total(totals, self.groups.data).tolist()
        if not weight > 0.0:
            raise ValueError(
                f"a global batch of {tokens:.0f} tokens has the loss weight {weight}: nothing to learn from"
            )
        return _Totals(weight, int(tokens), int(filled), squares / tokens)

    def _means(self, sums: Mapping[str, tuple[Tensor, Tensor]], names: Sequence[str]) -> dict[str, float]:
        """The same numbers on every rank, of what only the last stages saw."""
        zero = torch.zeros((), device=self.device)
        pairs = [sums.get(name, (zero, zero)) for name in names]
        flat = torch.stack([value.double() for pair in pairs for value in pair])
        # Context and tensor ranks hold the same sums.
        values = total(total(flat, self.groups.data), self.groups.pipeline).tolist()
        totals = dict(zip(names, zip(values[::2], values[1::2], strict=True), strict=True))
        loss, _ = totals.pop("loss", (0.0, 0.0))
        return {"loss": loss, **{name: summed / weight for name, (summed, weight) in totals.items() if weight}}

    def _names(self, asked: tuple[Loss, bool], sums: Mapping[str, object]) -> list[str]:
        """What the last stage measured: the others have to take part in summing it. Told once for a loss and a pass."""
        group = self.groups.pipeline
        if group.size == 1:
            return [*sums]
        if self._told is None or self._told[0] != asked:
            names = [[*sums]]
            dist.broadcast_object_list(names, group=group.handle, group_src=group.size - 1)
            self._told = asked, names[0]
        if sums and [*sums] != self._told[1]:
            raise ValueError(f"a loss measured {', '.join(self._told[1])} before and now {', '.join(sums)}")
        return self._told[1]

    def _from_last_stage(self, outputs: TokenOutputs | None, batch: MicroBatch) -> TokenOutputs:
        group = self.groups.pipeline
        if group.size == 1 and outputs is not None:
            return outputs
        both = torch.zeros((2, len(batch.tokens)), device=self.device)
        if outputs is not None:
            both = torch.stack([outputs.log_probabilities, outputs.entropy])
        dist.broadcast(both, group=group.handle, group_src=group.size - 1)
        return TokenOutputs(both[0], both[1])

    def _here(self, batch: MicroBatch) -> MicroBatch:
        """The micro batch on this device; its boundaries stay on the host too, where they are looked at."""
        return replace(
            batch,
            tokens=batch.tokens.to(self.device, non_blocking=True),
            labels=batch.labels.to(self.device, non_blocking=True),
            weights=batch.weights.to(self.device, non_blocking=True),
            extras={name: value.to(self.device, non_blocking=True) for name, value in batch.extras.items()},
        )

    # --- what an update is made of ----------------------------------------------------------------------------------

    def _freeze(self) -> None:
        if router_is_frozen(self.spec):
            for mixture in self._mixtures():
                mixture.router.requires_grad_(requires_grad=False)

    def _clipping(self, norm: float) -> float:
        most = self.spec.training.clip_grad
        return min(1.0, most / (norm + 1e-6)) if most else 1.0

    def _begin_balancing(self, batch: GlobalBatch) -> None:
        for balance in self._balances():
            balance.begin(batch)

    def _move_selection_bias(self) -> None:
        """Makes experts that got too much less likely to be chosen, and the others more."""
        if self.spec.moe.balancing is not Balancing.EXPERT_BIAS:
            return
        for mixture in self._mixtures():
            bias = mixture.router.selection_bias
            if bias is None:
                raise ValueError("moe.balancing ExpertBias needs a model that chooses experts by a bias; use AuxLoss")
            rate = self.spec.moe.expert_bias_update_rate
            bias.copy_(updated_selection_bias(bias, self.load(mixture.balance), rate))

    def load(self, balance: Balance) -> Tensor:
        """Tokens that each expert of a layer got since the last update, over all ranks. [E]"""
        return total(total(balance.load.clone(), self.groups.tensor), self.groups.replicas)

    def _count(self, is_applied: bool, norm: float, loss: float) -> None:
        self.updates += 1
        self._skipped = 0 if is_applied else self._skipped + 1
        if self._skipped >= _MOST_SKIPPED:
            raise Diverged(
                f"loss {loss} and gradient norm {norm} were not finite in {self._skipped} updates in a row; lower "
                "training.optimizer.learningRate, or look at the data of these steps"
            )

    def _mixtures(self) -> Iterator[Mixture]:
        return (module for stage in self.stages for module in stage.modules() if isinstance(module, Mixture))

    def _balances(self) -> Iterator[Balance]:
        return (mixture.balance for mixture in self._mixtures())


@dataclass(frozen=True, slots=True)
class _Totals:
    """A global batch, over all data ranks."""

    weight: float
    tokens: int
    # Those with a token that is no padding.
    micro_batches: int
    # The length of its document, for the mean token: attention costs as much as if all documents had this length.
    document_tokens: float


class _Sums:
    """What micro batches add up to, on the device: reading each would wait for it."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, terms: LossTerms) -> None:
        summed = terms.total.detach()
        for name, mean in {"loss": Mean(summed, torch.zeros_like(summed)), **terms.metrics}.items():
            pair = tuple(torch.as_tensor(value, device=summed.device).detach() for value in (mean.total, mean.weight))
            known = self.values.get(name, (torch.zeros_like(summed), torch.zeros_like(summed)))
            self.values[name] = (known[0] + pair[0], known[1] + pair[1])
