"""The training engine on Megatron: its schedules, buffers and groups behind the interface that the loop calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from moejob_api.derived import has_frozen_router, has_reference
from moejob_api.job.job import Spec
from moejob_api.job.moe import BalancingMethod
from moejob_api.planner.cost.estimate import model_flops
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.tensor_table import ExpertStacking
from moejob_trainer.distributed import messages
from moejob_trainer.distributed.collectives import sum_over_group
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.routing import updated_selection_bias
from moejob_trainer.megatron.data_parallel import make_data_parallel
from moejob_trainer.megatron.gradients import finish_gradients
from moejob_trainer.megatron.optimizer import ShardedAdamW, make_moment_storage
from moejob_trainer.megatron.pipeline import forward_backward, gather_row_values, make_stage_input
from moejob_trainer.megatron.reference import ReferenceWeights
from moejob_trainer.megatron.state_copies import StateCopies
from moejob_trainer.megatron.update_metrics import CollectedMetrics, UpdateMetrics
from moejob_trainer.megatron.weights import merged_weights, model_groups
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.balancing import ExpertBalance, GlobalBatch
from moejob_trainer.model.float8 import forget_roundings
from moejob_trainer.model.moe_layer import MoELayer
from moejob_trainer.model.stage import ModelStage, StageInput, StageOutput
from moejob_trainer.objectives.multi_token_prediction import mtp_loss
from moejob_trainer.runtime.ranges import named_range
from moejob_trainer.training import LossFunction, LossTerms, MicroBatch, TokenOutputs, UpdateResult, WeightedMean
from moejob_trainer.training.micro_batch import FILLER, ROUTING


class Diverged(RuntimeError):
    """The gradient was not finite several times in a row."""


# One bad batch only skips an update. Three in a row mean that the weights no longer give finite numbers.
_MOST_SKIPPED = 3
_NAMES = TypeAdapter(list[str])


@dataclass(frozen=True, slots=True)
class TrainingPlacement:
    """The groups, device and control group of this rank."""

    groups: Groups
    device: torch.device
    # Of all ranks, for messages; None for a rank that is alone.
    control: dist.ProcessGroup | None = None

    @property
    def model_groups(self) -> ModelGroups:
        """The groups that divide parameters, as conversion wants them."""
        return model_groups(self.groups, self.control)


class MegatronTrainingEngine:
    """A model spread over ranks by Megatron's groups. `learning_rate` returns the rate of a step, counted from 0."""

    def __init__(
        self,
        model: Architecture,
        spec: Spec,
        stages: Sequence[ModelStage],
        placement: TrainingPlacement,
        learning_rate: Callable[[int], float],
    ) -> None:
        self.model, self.spec, self._stages = model, spec, [*stages]
        self.placement, self.groups, self.device = placement, placement.groups, placement.device
        self.learning_rate = learning_rate
        self.update_metrics = UpdateMetrics(model, spec.moe, self._stages, placement.groups, placement.device)
        # Copies of the state for a save: before weights or moments change, the copies have to be made.
        self.copies = StateCopies(placement.device)
        self.updates = self.step = 0
        self._skipped = 0
        # The last loss function, whether its pass was forward only, and the names of its metrics.
        self._metric_names: tuple[tuple[LossFunction, bool], list[str]] | None = None
        self._freeze_routers()
        self.data_parallel = make_data_parallel(self._stages, spec)
        # At this point weights have moved into buffers, and are still those that training starts from.
        self.reference = ReferenceWeights(self._stages) if has_reference(spec) else None
        self.optimizer = ShardedAdamW(
            self.data_parallel, self.groups, spec.training.optimizer, make_moment_storage(spec)
        )

    @property
    def stages(self) -> Sequence[ModelStage]:
        """Return the stages of this rank when all their weights have arrived from the replicas."""
        self.data_parallel.finish_gather()
        return self._stages

    # --- the interface of the loop ---------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Take the learning rate of a step for the updates that follow.

        A count of updates is no count of steps: GRPO makes no update from groups that it cannot learn from.
        """
        self.step = step

    def update(self, batches: Sequence[MicroBatch], loss: LossFunction) -> UpdateResult:
        """Update the weights once, from this data rank's micro batches of a global batch."""
        with named_range("forward and backward"):
            self._begin_balancing(batches)
            self.data_parallel.zero_gradients()
            result = self._run(batches, loss, forward_only=False)
        with named_range("gradients"):
            finish_gradients(self._stages, self.data_parallel, self.groups)
            norm = self.optimizer.gradient_norm()
        rate = self.learning_rate(self.step)
        is_applied = math.isfinite(norm) and math.isfinite(result.loss)
        with named_range("optimizer"):
            if is_applied:
                self.copies.finish_copy()
                self.optimizer.update(rate, self._clipping_factor(norm))
                self._move_selection_bias()
        self._count_update(is_applied, norm, result.loss)
        return replace(result, gradient_norm=norm, learning_rate=rate, is_applied=is_applied)

    def evaluate(self, batches: Sequence[MicroBatch], loss: LossFunction) -> UpdateResult:
        """Return the loss, without an update."""
        with named_range("evaluation"), torch.no_grad():
            return self._run(batches, loss, forward_only=True)

    def compute_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """Return the outputs of a forward pass alone; the last stage sends them to the others."""
        outputs_by_number: dict[int, TokenOutputs] = {}

        def keep_outputs(number: int, outputs: TokenOutputs, _: MicroBatch) -> Tensor:
            outputs_by_number[number] = outputs
            return outputs.log_probabilities.sum()

        with torch.no_grad():
            self._run_stages([self._move_to_device(batch) for batch in batches], keep_outputs, forward_only=True)
        return [self._from_last_stage(outputs_by_number.get(number), batch) for number, batch in enumerate(batches)]

    def next_tokens(self, batches: Sequence[MicroBatch], documents: int) -> list[int]:
        """Return the likeliest token behind each document of a global batch, of all data ranks, to every rank."""
        likeliest_tokens = torch.zeros(documents, dtype=torch.int64, device=self.device)
        labelled_batches = [replace(batch, labels=_end_labels(batch)) for batch in batches]

        def keep_tokens(_: int, outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
            if outputs.likeliest is not None:
                document_places = [place for place in batch.documents if place != FILLER]
                likeliest_tokens[document_places] = outputs.likeliest[outputs.likeliest >= 0]
            return outputs.log_probabilities.sum()

        with named_range("answers"), torch.no_grad():
            self._run_stages(
                [self._move_to_device(batch) for batch in labelled_batches],
                keep_tokens,
                forward_only=True,
                predicts_tokens=True,
            )
        # A sum collects them: ranks with other documents or without the last stage have zeros, and tensor and context
        # ranks, over which nothing is summed, all hold the same.
        return [
            int(token)
            for token in sum_over_group(
                sum_over_group(likeliest_tokens, self.groups.data), self.groups.pipeline
            ).tolist()
        ]

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Compute outputs at another temperature than the job's."""
        heads = [stage.output for stage in self._stages if stage.place.is_last]
        job_temperatures = [head.temperature for head in heads]
        for head in heads:
            head.temperature = temperature
        try:
            yield
        finally:
            for head, job_temperature in zip(heads, job_temperatures, strict=True):
                head.temperature = job_temperature

    def compute_reference_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """Return the outputs of the reference model: the weights before the first update."""
        if self.reference is None:
            raise ValueError("there is no reference model; grpo.kl.coefficient is 0")
        self.copies.finish_copy()
        # The reference's own router chooses: experts that the trained router chose are no part of the reference.
        with self.reference.use_reference():
            return self.compute_outputs([batch.without_extra(ROUTING) for batch in batches])

    def export_weights(self, stacked_elements: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield weights by Hugging Face name, one whole tensor at a time: values on one rank, meta on the others."""
        stacking = ExpertStacking(self.groups.expert.size, stacked_elements) if stacked_elements else None
        named = build_tensor_table(self.model.shape, stacking)
        return hugging_face_tensors(merged_weights(self.stages), named, self.placement.model_groups)

    # --- a global batch ---------------------------------------------------------------------------------------------

    def _run(self, batches: Sequence[MicroBatch], loss: LossFunction, *, forward_only: bool) -> UpdateResult:
        local_batches = [self._move_to_device(batch) for batch in batches]
        totals = self._sum_totals(local_batches)
        weight = totals.weight
        sums = _MetricSums()

        def finish_batch(_: int, outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
            terms, mtp = loss(outputs, batch), mtp_loss(outputs, batch)
            sums.add_terms(replace(terms, metrics={**terms.metrics, **mtp.metrics}))
            return (terms.total + self.spec.training.mtp_loss_coefficient * mtp.total) / weight

        self._run_stages(local_batches, finish_batch, forward_only=forward_only)
        summed = self._sum_metrics(sums.values, self._agree_on_names((loss, forward_only), sums.values))
        summed_loss, _ = summed.pop("loss", (0.0, 0.0))
        means = {name: value / metric_weight for name, (value, metric_weight) in summed.items()}
        collected = CollectedMetrics({}) if forward_only else self.update_metrics.collect_metrics()
        return UpdateResult(
            loss=summed_loss / weight,
            gradient_norm=0.0,
            learning_rate=0.0,
            tokens=totals.tokens,
            flops=totals.tokens * model_flops(self.model.shape, totals.document_tokens),
            metrics=means | collected.numbers,
            weights={"loss": weight, **{name: weight_sum for name, (_, weight_sum) in summed.items()}},
            expert_counts=collected.expert_counts,
        )

    def _run_stages(
        self,
        batches: Sequence[MicroBatch],
        finish: Callable[[int, TokenOutputs, MicroBatch], Tensor],
        *,
        forward_only: bool,
        counts_choices: bool = False,
        predicts_tokens: bool = False,
    ) -> None:
        def finish_output(number: int, output: StageOutput) -> Tensor:
            likeliest = None if output.likeliest is None else gather_row_values(output.likeliest, self.groups)
            log_probabilities, entropy, *mtp = (
                gather_row_values(values, self.groups)
                for values in (output.log_probabilities, output.entropy, *output.mtp)
            )
            return finish(number, TokenOutputs(log_probabilities, entropy, tuple(mtp), likeliest), batches[number])

        rows = [
            replace(self._make_row_input(number, batch, counts_choices), is_asked=predicts_tokens)
            for number, batch in enumerate(batches)
        ]
        divided = self.groups.tensor.size if self.spec.parallelism.sequence_parallel else 1
        shapes = [(len(row.tokens) // divided, 1, self.model.shape.hidden) for row in rows]
        forward_backward(self.data_parallel.model_chunks, rows, finish_output, forward_only=forward_only, shapes=shapes)
        self.data_parallel.release_weights()
        for stage in self._stages:
            forget_roundings(stage)

    def _make_row_input(self, number: int, batch: MicroBatch, counts_choices: bool) -> StageInput:
        sequence_parallel = self.spec.parallelism.sequence_parallel
        layer_numbers = [index for stage in self._stages for index in stage.place.layers]
        row_input = make_stage_input(batch, self.model, self.groups, layer_numbers, sequence_parallel=sequence_parallel)
        packed = replace(row_input.packed, number=number, update=self.updates, counts_choices=counts_choices)
        return replace(row_input, packed=packed)

    def _sum_totals(self, batches: Sequence[MicroBatch]) -> _BatchTotals:
        """Sum weights and tokens before the backward pass: gradients are divided by them alike in every layout.

        The mean token stands in a document of sum(n^2) / sum(n) tokens: 182 / 18 = 10.1 for documents of 2, 3, 13.
        """
        weight = sum(float(batch.weights.double().sum()) for batch in batches)
        tokens = sum(sum(batch.lengths) for batch in batches)
        squares = sum(length * length for batch in batches for length in batch.lengths)
        totals = torch.tensor([weight, tokens, squares], dtype=torch.float64, device=self.device)
        weight, tokens, squares = sum_over_group(totals, self.groups.data).tolist()
        if not weight > 0.0:
            raise ValueError(
                f"a global batch of {tokens:.0f} tokens has the loss weight {weight}: nothing to learn from"
            )
        return _BatchTotals(weight, int(tokens), squares / tokens)

    def _sum_metrics(
        self, sums: Mapping[str, tuple[Tensor, Tensor]], names: Sequence[str]
    ) -> dict[str, tuple[float, float]]:
        """Sum the metrics of the last stages over all ranks. Every rank gets the total and weight of each name."""
        zero = torch.zeros((), device=self.device)
        pairs = [sums.get(name, (zero, zero)) for name in names]
        flat = torch.stack([value.double() for pair in pairs for value in pair])
        # Context and tensor ranks hold the same sums.
        values = sum_over_group(sum_over_group(flat, self.groups.data), self.groups.pipeline).tolist()
        totals = zip(names, values[::2], values[1::2], strict=True)
        # The loss comes without a weight: it is divided by that of the global batch.
        return {name: (summed, weight) for name, summed, weight in totals if weight or name == "loss"}

    def _agree_on_names(self, loss_and_pass: tuple[LossFunction, bool], sums: Mapping[str, object]) -> list[str]:
        """Return the names of the last stage's metrics, which every stage needs to take part in their sum.

        The last stage sends them once for each loss function and kind of pass.
        """
        group = self.groups.pipeline
        if group.size == 1:
            return [*sums]
        if self._metric_names is None or self._metric_names[0] != loss_and_pass:
            self._metric_names = (
                loss_and_pass,
                messages.broadcast_value([*sums], _NAMES, group.handle, source=group.size - 1),
            )
        if sums and [*sums] != self._metric_names[1]:
            raise ValueError(f"a loss measured {', '.join(self._metric_names[1])} before and now {', '.join(sums)}")
        return self._metric_names[1]

    def _from_last_stage(self, outputs: TokenOutputs | None, batch: MicroBatch) -> TokenOutputs:
        group = self.groups.pipeline
        if group.size == 1 and outputs is not None:
            return outputs
        both = torch.zeros((2, len(batch.tokens)), device=self.device)
        if outputs is not None:
            both = torch.stack([outputs.log_probabilities, outputs.entropy])
        dist.broadcast(both, group=group.handle, group_src=group.size - 1)
        return TokenOutputs(both[0], both[1])

    def _move_to_device(self, batch: MicroBatch) -> MicroBatch:
        """Move a micro batch to this device; its boundaries stay on the host, which reads them."""
        return replace(
            batch,
            tokens=batch.tokens.to(self.device, non_blocking=True),
            labels=batch.labels.to(self.device, non_blocking=True),
            weights=batch.weights.to(self.device, non_blocking=True),
            extras={
                # A replayed routing is of all layers and tokens: only this rank's part of it goes to the device, later.
                name: value if name == ROUTING else value.to(self.device, non_blocking=True)
                for name, value in batch.extras.items()
            },
        )

    # --- parts of an update -----------------------------------------------------------------------------------------

    def _freeze_routers(self) -> None:
        if has_frozen_router(self.spec):
            for weight in (weight for stage in self._stages for weight in stage.router_weights()):
                weight.requires_grad = False

    def _clipping_factor(self, norm: float) -> float:
        max_norm = self.spec.training.clip_grad
        return min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0

    def _begin_balancing(self, batches: Sequence[MicroBatch]) -> None:
        global_batches = self._router_batches(batches)
        balances = [*self._expert_balances()]
        for ahead, balance in balances:
            balance.start_batch(global_batches[ahead])
        if any(balance.needs_counts_first for _, balance in balances):
            self._count_choices(batches)

    def _router_batches(self, batches: Sequence[MicroBatch]) -> list[GlobalBatch]:
        """Count tokens and documents over all data ranks, for the layers and for each MTP module.

        Module d predicts d tokens further on, so a document of n tokens has n - d for it: lengths 5 and 1 count as
        (6 tokens, 2 documents) for the layers and (4, 1) for the first module.
        """
        lengths = torch.tensor([length for batch in batches for length in batch.lengths], device=self.device)
        predicted_lengths = [(lengths - ahead).clamp(min=0) for ahead in range(len(self.model.shape.mtp_layers) + 1)]
        counts = torch.stack([torch.stack([remaining.sum(), (remaining > 0).sum()]) for remaining in predicted_lengths])
        # A module may look beyond the end of every document.
        return [GlobalBatch(*pair) for pair in sum_over_group(counts, self.groups.data).clamp(min=1).tolist()]

    def _count_choices(self, batches: Sequence[MicroBatch]) -> None:
        """Send the global batch through the model once more: GlobalAuxLoss needs the choices of all of it first."""
        local_batches = [self._move_to_device(batch) for batch in batches]
        with torch.no_grad():
            self._run_stages(local_batches, _unused_loss, forward_only=True, counts_choices=True)
        for _, balance in self._expert_balances():
            balance.finish_counting()

    def _move_selection_bias(self) -> None:
        """Lower the selection bias of experts with more tokens than the mean, and raise that of the others."""
        if self.spec.moe.balancing is not BalancingMethod.EXPERT_BIAS:
            return
        for moe in self._moe_layers():
            bias = moe.router.selection_bias
            if bias is None:
                raise ValueError("moe.balancing ExpertBias needs a model that chooses experts by a bias; use AuxLoss")
            rate = self.spec.moe.expert_bias_update_rate
            bias.copy_(updated_selection_bias(bias, self.sum_expert_load(moe.balance), rate))

    def sum_expert_load(self, balance: ExpertBalance) -> Tensor:
        """Return the tokens of each expert of a layer since the last update, over all ranks. [E]"""
        return sum_over_group(sum_over_group(balance.load.clone(), self.groups.tensor), self.groups.replicas)

    def _count_update(self, is_applied: bool, norm: float, loss: float) -> None:
        self.updates += 1
        self._skipped = 0 if is_applied else self._skipped + 1
        if self._skipped >= _MOST_SKIPPED:
            raise Diverged(
                f"loss {loss} and gradient norm {norm} were not finite in {self._skipped} updates in a row; lower "
                "training.optimizer.learningRate, or look at the data of these steps"
            )

    def _moe_layers(self) -> Iterator[MoELayer]:
        return (module for stage in self._stages for module in stage.modules() if isinstance(module, MoELayer))

    def _expert_balances(self) -> Iterator[tuple[int, ExpertBalance]]:
        """Yield the balance of each MoE layer of this rank, with its MTP depth: 0 for the model's own layers."""
        layers = len(self.model.shape.layers)
        for stage in self._stages:
            for index, layer in stage.numbered_layers():
                yield from (
                    (max(0, index - layers + 1), module.balance)
                    for module in layer.modules()
                    if isinstance(module, MoELayer)
                )


def _unused_loss(_: int, outputs: TokenOutputs, __: MicroBatch) -> Tensor:
    """Return any loss: the pass only counts choices."""
    return outputs.log_probabilities.sum()


def _end_labels(batch: MicroBatch) -> Tensor:
    """Return labels that ask for the token behind each document, and for no other. [T]"""
    labels = torch.full_like(batch.labels, -1)
    for start, length in zip(batch.cu_lengths.tolist(), batch.lengths, strict=False):
        if length:
            labels[start + length - 1] = 0
    return labels


@dataclass(frozen=True, slots=True)
class _BatchTotals:
    """A global batch, over all data ranks."""

    weight: float
    tokens: int
    # The document length of the mean token: attention costs as much as with all documents of this length.
    document_tokens: float


class _MetricSums:
    """Sums over micro batches, on the device: reading each would wait for it."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[Tensor, Tensor]] = {}

    def add_terms(self, terms: LossTerms) -> None:
        summed = terms.total.detach()
        for name, mean in {"loss": WeightedMean(summed, torch.zeros_like(summed)), **terms.metrics}.items():
            pair = tuple(torch.as_tensor(value, device=summed.device).detach() for value in (mean.total, mean.weight))
            previous = self.values.get(name, (torch.zeros_like(summed), torch.zeros_like(summed)))
            self.values[name] = (previous[0] + pair[0], previous[1] + pair[1])
