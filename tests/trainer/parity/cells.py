"""The proof that every layout trains the same model: cells of the parity matrix, and the reference they are held to.

The reference is Transformers in one process, document by document. Weights are asymmetric, documents of different
lengths, their loss weights uneven. Gradients, as they are before clipping, and the weights after the last step are
compared tensor by tensor: each rank looks at the pieces its optimizer updates, and all of them together are the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from builders import merge_sections, spec
from model_configs import config as small_config
from moejob_api.derived import trained_shape
from moejob_api.job import Spec
from moejob_api.job.training import Lora
from moejob_api.layout.sizes import Layout
from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family, ModelShape
from moejob_trainer.conversion.adapters import build_adapter_table
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.loading import open_published_checkpoint
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.optimizer import OptimizerShard
from moejob_trainer.megatron.topology import start_groups, stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement
from moejob_trainer.megatron.weights import (
    adapter_weights,
    forget_weights,
    initialise_adapters,
    load_pretrained,
    named_weights,
    part_slices,
    rank_coordinates,
    read_weights,
)
from moejob_trainer.model.architecture import Architecture, read_architecture, trained_architecture
from moejob_trainer.model.joint_norm import JointNorm
from moejob_trainer.model.parameters import Parameter
from moejob_trainer.model.stage import ModelStage
from moejob_trainer.objectives.losses import cross_entropy
from moejob_trainer.setup.training_engine import build_model_stages
from moejob_trainer.training import Document, LossTerms, MicroBatch, TokenOutputs, UpdateResult
from trainer.training_data import total_loss_weight

STEPS = 3
LEARNING_RATE = 1e-2
TRAINING: dict[str, Any] = {
    "globalBatchSize": 8,
    "clipGrad": 1.0,
    # A large epsilon: Adam divides gradients near zero by their own size, and would show rounding, not mistakes.
    "optimizer": {"learningRate": LEARNING_RATE, "weightDecay": 0.1, "epsilon": 1e-3},
}
LENGTHS = (9, 17, 5, 23, 12, 7, 14, 10)
_GROUPED: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rope_theta": 5000.0,
    "rms_norm_eps": 3e-4,
}
_SIGMOID: dict[str, Any] = {
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
# Three value heads share a key head, and the third layer alone has softmax attention.
_HYBRID: dict[str, Any] = {
    "full_attention_interval": 3,
    "partial_rotary_factor": 0.6,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 18,
}
# theta is nowhere the 10000 that everything falls back to, and no epsilon the 1e-6.
MODELS: dict[Family, dict[str, Any]] = {
    Family.MIXTRAL: _GROUPED,
    Family.QWEN3_MOE: _GROUPED | {"norm_topk_prob": True},
    Family.QWEN3_NEXT: _GROUPED | _HYBRID,
    Family.QWEN3_5_MOE: _GROUPED | _HYBRID,
    Family.QWEN2_MOE: _GROUPED | {"decoder_sparse_step": 2},
    Family.DEEPSEEK_V2: _GROUPED | {"num_key_value_heads": 8, "first_k_dense_replace": 1},
    Family.DEEPSEEK_V3: _GROUPED | _SIGMOID | {"num_key_value_heads": 8},
    Family.GLM4_MOE: _GROUPED | _SIGMOID | {"use_qk_norm": True, "partial_rotary_factor": 0.6},
    Family.GLM4_MOE_LITE: _GROUPED
    | {key: value for key, value in _SIGMOID.items() if key != "first_k_dense_replace"}
    | {"num_key_value_heads": 8},
    Family.OLMOE: _GROUPED | {"norm_topk_prob": True},
    Family.ERNIE4_5_MOE: _GROUPED | {"tie_word_embeddings": True, "moe_layer_start_index": 2},
    Family.MINIMAX_M2: _GROUPED,
    Family.GPT_OSS: _GROUPED | {"sliding_window": 6},
    Family.LLAMA: _GROUPED,
    Family.QWEN2: _GROUPED | {"tie_word_embeddings": True},
    Family.QWEN3: _GROUPED | {"tie_word_embeddings": True},
}

# Where Megatron and Transformers read a config differently, it says what published ones say. Megatron takes one epsilon
# for all norms, Transformers 1e-6 for those of compressed vectors; Megatron scores a group of experts by its best
# (experts of a token / kept groups), Transformers by its best two.
MEGATRON_NUMBERS: dict[Family, dict[str, Any]] = {
    Family.GLM4_MOE: {"num_experts_per_tok": 4, "topk_group": 2},
    Family.DEEPSEEK_V3: {"rms_norm_eps": 1e-6, "num_experts_per_tok": 4, "topk_group": 2},
}

FOLDED: dict[str, Any] = {"expertLayout": "Folded"}
# Ways to train that change nothing, in any layout.
ALIKE: dict[str, dict[str, Any]] = {
    "everything recomputed": {"training": {"recompute": {"granularity": "Full"}}},
    "groups of layers recomputed": {
        "training": {"recompute": {"granularity": "Full", "method": "Uniform", "layers": 3}}
    },
    "the first layers recomputed": {"training": {"recompute": {"granularity": "Full", "method": "Block", "layers": 2}}},
    "norms and activations recomputed": {"training": {"recompute": {"granularity": "Selective"}}},
    "activations offloaded": {"memory": {"offloadActivations": True}},
    "one document at a time": {"data": {"packing": False}, "training": {"microBatchSize": 1}},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor": 2},
    "PP2": {"pipeline": 2},
    "PP2.VPP2": {"pipeline": 2, "virtualPipeline": 2},
    "EP2": {"expert": 2},
    "CP2": {"context": 2},
    "DP2": {"data": 2},
    "DP4": {"data": 4},
    "ETP2 folded": {"data": 2, "expertTensor": 2, **FOLDED},
    "EP4 folded over DP4": {"data": 4, "expert": 4, **FOLDED},
    "TP2.EP4 folded over TP2.DP2": {"tensor": 2, "data": 2, "expert": 4, **FOLDED},
    "CP2.EP2 folded over CP2": {"context": 2, "expert": 2, **FOLDED},
    "TP2.EP2": {"tensor": 2, "expert": 2},
    "TP2.PP2.EP2": {"tensor": 2, "pipeline": 2, "expert": 2},
    "TP2.CP2.DP2": {"tensor": 2, "context": 2, "data": 2},
    "PP4.VPP1.DP2": {"pipeline": 4, "data": 2},
    "PP2.EP2.CP2": {"pipeline": 2, "expert": 2, "context": 2},
}


@dataclass(frozen=True)
class StepMeasurements:
    """Measurements of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    balancing: tuple[float, ...] = (0.0,) * STEPS
    further: tuple[float, ...] = (0.0,) * STEPS


@dataclass(frozen=True)
class Deviation:
    """The tensor that is furthest from the reference, relative to the largest element of that tensor."""

    name: str = ""
    error: float = 0.0

    def or_worse(self, other: Deviation) -> Deviation:
        """The larger of two."""
        return other if other.error > self.error or not np.isfinite(other.error) else self


@dataclass(frozen=True)
class TrainedRank:
    """Results of one rank."""

    steps: StepMeasurements
    gradients: Deviation
    weights: Deviation
    selection_biases: Mapping[str, list[float]]


@dataclass(frozen=True)
class Cell:
    """One way of training the model. `sections` are laid over the job; a mutant is a mistake made on purpose."""

    family: Family
    sections: Mapping[str, Any]
    mutant: str = ""
    lengths: tuple[int, ...] = LENGTHS

    def spec(self) -> Spec:
        """The job of the cell."""
        base = {
            "model": {"dtype": "float32"},
            "data": {"maxLength": 32},
            "training": TRAINING,
            "moe": {"balancing": "None"},
            "resources": {"accelerator": "CPU", "cpu": 1, "memory": "64Gi"},
        }
        return spec(**merge_sections(base, self.sections))

    def ranks(self) -> int:
        """Ranks that it takes."""
        return self.layout().gpus

    def layout(self) -> Layout:
        """Sizes of its groups, and nodes."""
        return layout_of(self.spec().parallelism, self.spec().resources.gpus_per_node)


def make_documents(step: int, lengths: Sequence[int] = LENGTHS) -> list[Document]:
    """The global batch of a step: no two documents alike, a third of all tokens without weight."""
    random = np.random.default_rng(step)
    batch = []
    for number, length in enumerate(lengths):
        tokens = random.integers(3, 38, length)
        weights = (random.random(length) < 0.67) * random.uniform(0.5, 1.5, length)
        batch.append(Document(tokens, weights.astype(np.float32), number))
    return batch


# --- the reference --------------------------------------------------------------------------------------------------


def write_reference(family: Family, folder: Path, **changes: Any) -> StepMeasurements:
    """Trains with Transformers. Leaves behind the first weights, their first gradients and the last weights."""
    model = reference_model(family, **changes)
    model.save_pretrained(folder / "first")
    losses: list[float] = []
    norms = descend_gradients(
        parameter_groups(model),
        lambda step: losses.append(run_backward(model, make_documents(step))),
        lambda: save_gradients(model, folder / "gradients", model.save_pretrained),
    )
    model.save_pretrained(folder / "last")
    return StepMeasurements(tuple(losses), norms)


def descend_gradients(
    groups: Sequence[dict[str, Any]], backward: Callable[[int], None], save: Callable[[], None]
) -> tuple[float, ...]:
    """The norms of the gradients that `backward` leaves behind at each step; the first ones are saved."""
    adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-3)
    parameters = [parameter for group in groups for parameter in group["params"]]
    norms = []
    for step in range(STEPS):
        adam.zero_grad()
        backward(step)
        if step == 0:
            save()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        adam.step()
    return tuple(norms)


def reference_model(family: Family, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(7)
    config = AutoConfig.for_model(**small_config(family, **MODELS[family] | changes), initializer_range=0.1)
    config._attn_implementation = config._experts_implementation = "eager"  # noqa: SLF001 how Transformers takes it
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        # Norms start at one and biases at zero: a pair that is mixed up would not be seen.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(torch.rand_like(buffer) * 0.2)
    return model


def parameter_groups(model: PreTrainedModel) -> list[dict[str, Any]]:
    parts = ("norm", "bias", "sinks", "A_log")
    plain = [parameter for name, parameter in model.named_parameters() if any(part in name for part in parts)]
    plain_ids = {id(parameter) for parameter in plain}
    decayed = [parameter for parameter in model.parameters() if id(parameter) not in plain_ids]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def run_backward(model: nn.Module, batch: Sequence[Document]) -> float:
    weight, loss = total_loss_weight(batch), 0.0
    for document in batch:
        tokens = torch.from_numpy(document.tokens)[None]
        logits = model(tokens, use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none")
        total = (losses * torch.from_numpy(document.weights[1:])).sum() / weight
        total.backward()
        loss += total.item()
    return loss


def save_gradients(model: nn.Module, folder: Path, save: Callable[[Path], object]) -> None:
    """As a model whose weights are gradients: the same table then says which of ours belongs to which."""
    weights_before = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        save(folder)
        for parameter, value in zip(model.parameters(), weights_before, strict=True):
            parameter.copy_(value)


# --- a cell ---------------------------------------------------------------------------------------------------------


def train_cell(cell: Cell, folder: Path) -> TrainedRank:
    """Trains the model in the cell's layout; one rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        results, gradients = [], Deviation()
        for step in range(STEPS):
            results.append(engine.update(micro_batches(cell, engine, step), make_loss(cell, engine)))
            if step == 0:
                gradients = measure_deviation(engine, folder / "gradients", lambda piece: piece.gradient)
        weights = measure_deviation(engine, folder / "last", lambda piece: piece.master.read())
    finally:
        stop_groups()
    steps = StepMeasurements(
        losses=tuple(result.loss for result in results),
        norms=tuple(result.gradient_norm for result in results),
        balancing=tuple(result.metrics.get("balancingLoss", 0.0) for result in results),
        further=tuple(result.metrics.get("mtpLoss", 0.0) for result in results),
    )
    return TrainedRank(steps, gradients, weights, dict(_selection_biases(engine)))


def _selection_biases(engine: MegatronTrainingEngine) -> Iterator[tuple[str, list[float]]]:
    for name, tensor in named_weights(engine.stages).items():
        if name.endswith("selection_bias"):
            yield name, tensor.tolist()


def start_engine(cell: Cell, folder: Path) -> MegatronTrainingEngine:
    """The engine of the cell on this rank, with the reference's first weights."""
    spec_of_cell = cell.spec()
    stages, groups, model = build_cell_stages(cell, folder)
    load_pretrained(stages, open_published_checkpoint(folder / "first", build_tensor_table(model.shape)), groups)
    lora = spec_of_cell.training.lora
    if lora is not None and not (folder / "adapters").exists():
        declared = build_adapter_table(model.shape, lora).parameters
        initialise_adapters(stages, declared, groups, spec_of_cell.training.seed)
    elif lora is not None:
        adapted = open_published_checkpoint(
            folder / "adapters", build_adapter_table(_read_shape(folder / "adapters", spec_of_cell), lora)
        )
        read_weights(adapter_weights(stages), adapted, groups)
    mistake = _MISTAKES_OF_STAGES.get(cell.mutant)
    if mistake is not None:
        mistake(stages)
    return _build_engine(cell, model, stages, groups)


def build_cell_stages(cell: Cell, folder: Path) -> tuple[list[ModelStage], Groups, Architecture]:
    """The stages of this rank, of which no weight is set, and the groups that divide them."""
    model = _read_model(cell, folder)
    groups = start_groups(cell.layout(), cell.spec().moe.dispatcher)
    return _build_stages(cell, folder, model, groups), groups, model


def build_blank_engine(cell: Cell, folder: Path, groups: Groups) -> MegatronTrainingEngine:
    """The same without any weights: what is not set is no number."""
    model = _read_model(cell, folder)
    stages = _build_stages(cell, folder, model, groups)
    forget_weights(stages)
    return _build_engine(cell, model, stages, groups)


def _read_model(cell: Cell, folder: Path) -> Architecture:
    config = json.loads((folder / "first" / "config.json").read_text())
    if cell.mutant == "theta 10000":
        config["rope_parameters"]["rope_theta"] = 10000.0
    model = trained_architecture(read_architecture(config), cell.spec())
    if cell.mutant == "halves turned":
        model = replace(model, rotary=replace(model.rotary, interleaved=not model.rotary.interleaved))
    if cell.mutant == "whole heads turned":
        model = replace(model, rotary=replace(model.rotary, dim=10))
    if cell.mutant == "weights not divided by their sum" and model.routing is not None:
        model = replace(model, routing=replace(model.routing, renormalized=False))
    return model


def _build_stages(cell: Cell, folder: Path, model: Architecture, groups: Groups) -> list[ModelStage]:
    config = json.loads((folder / "first" / "config.json").read_text())
    return build_model_stages(config, model, cell.spec(), cell.layout(), _placement(groups))


def _build_engine(cell: Cell, model: Architecture, stages: list[ModelStage], groups: Groups) -> MegatronTrainingEngine:
    return MegatronTrainingEngine(model, cell.spec(), stages, _placement(groups), lambda _: LEARNING_RATE)


def _placement(groups: Groups) -> TrainingPlacement:
    return TrainingPlacement(groups, torch.device("cpu"), groups.world.handle)


def micro_batches(cell: Cell, engine: MegatronTrainingEngine, step: int) -> list[MicroBatch]:
    """This data rank's part of a step."""
    batch = make_documents(step, cell.lengths)
    if cell.mutant == "mask shifted":
        batch = [Document(d.tokens, np.roll(d.weights, 1), d.id) for d in batch]
    own_batches = build_global_batch(batch, batch_plan(engine.spec, cell.layout(), pad_token=0))[
        engine.groups.data.rank
    ]
    mistaken = MISTAKEN.get(cell.mutant)
    return (
        own_batches
        if mistaken is None
        else [mistaken(*(getattr(one, f.name) for f in fields(one))) for one in own_batches]
    )


class _OneLater(MicroBatch):
    def shift_ahead(self, values: Tensor, by: int) -> Tensor:
        return MicroBatch.shift_ahead(self, values, by + 1)


class _RunTogether(MicroBatch):
    def shift_ahead(self, values: Tensor, by: int) -> Tensor:
        return values.roll(-by)


MISTAKEN = {"one token later": _OneLater, "documents run together": _RunTogether}


def make_loss(cell: Cell, engine: MegatronTrainingEngine) -> Callable[[TokenOutputs, MicroBatch], LossTerms]:
    """Return the loss of training: cross-entropy."""
    scale = 1.0 / engine.groups.data.size if cell.mutant == "gradients over DP" else 1.0

    def loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        # The number that is reported stays right: only gradients go wrong.
        total = cross_entropy(outputs.log_probabilities, batch.weights)
        return LossTerms(total * scale + total.detach() * (1.0 - scale))

    return loss


def _swap_experts(stages: Sequence[torch.nn.Module]) -> None:
    for name, parameter in stages[0].named_parameters():
        if name.endswith("experts.down"):
            parameter.data[[0, 1]] = parameter.data[[1, 0]]
            return


def _skip_layer(stages: Sequence[Any]) -> None:
    layers = stages[0].layers
    last = [*layers][-1]
    for parameter in (layers[last].attention.output.weight, *_output_weights(layers[last])):
        parameter.data.zero_()


def _forget_selection_bias(stages: Sequence[Any]) -> None:
    for name, buffer in stages[0].named_buffers():
        if name.endswith("selection_bias"):
            buffer.zero_()


def _skip_shared_experts(stages: Sequence[Any]) -> None:
    for name, parameter in stages[0].named_parameters():
        if name.endswith("shared.down.weight"):
            parameter.data.zero_()


def _norm_heads_apart(stages: Sequence[Any]) -> None:
    """Each tensor rank by its own heads."""
    for module in stages[0].modules():
        if isinstance(module, JointNorm):
            module.group, module.size = None, module.weight.numel()


_MISTAKES_OF_STAGES: dict[str, Callable[[Sequence[Any]], None]] = {
    "two experts swapped": _swap_experts,
    "a layer skipped": _skip_layer,
    "choice without its bias": _forget_selection_bias,
    "shared experts skipped": _skip_shared_experts,
    "heads normed apart": _norm_heads_apart,
}


def _output_weights(layer: Any) -> Iterator[torch.nn.Parameter]:
    if hasattr(layer, "moe"):
        yield layer.moe.experts.down
        if layer.moe.shared is not None:
            yield layer.moe.shared.down.weight
    else:
        yield layer.mlp.down.weight


def _read_shape(folder: Path, spec_of_cell: Spec) -> ModelShape:
    return trained_shape(shape_of(json.loads((folder / "config.json").read_text())), spec_of_cell)


@cache
def _read_reference(folder: Path, shape: ModelShape, lora: Lora | None) -> Mapping[str, tuple[Parameter, Tensor]]:
    """All of a reference under our names. A rank keeps it: it is held against the same few in cell after cell."""
    source = open_published_checkpoint(
        folder, build_tensor_table(shape) if lora is None else build_adapter_table(shape, lora)
    )
    return {
        parameter.name: (parameter, source.read_parameter(parameter, tuple(slice(0, size) for size in parameter.shape)))
        for parameter in source.table.parameters
    }


def measure_deviation(
    engine: MegatronTrainingEngine, folder: Path, taken: Callable[[OptimizerShard], Tensor]
) -> Deviation:
    """Return how far this rank's pieces are from the reference."""
    worst = Deviation()
    place = rank_coordinates(engine.groups)
    reference = _read_reference(folder, _read_shape(folder, engine.spec), engine.spec.training.lora)
    stage_of = {parameter: stage for stage in engine.stages for parameter in stage.parameters()}
    for piece in engine.optimizer.pieces:
        parts = [(part, *reference[part.name]) for part in stage_of[piece.parameter].stored_parts(piece.name)]
        expected = torch.cat([whole[part_slices(part, parameter, place)].flatten() for part, parameter, whole in parts])
        largest = max(whole.abs().max().item() for _, _, whole in parts)
        error = (taken(piece) - expected[piece.start : piece.stop]).abs().max().item() / max(largest, 1e-30)
        worst = worst.or_worse(Deviation(piece.name, error))
    return worst


def assert_like(trained_on_ranks: Sequence[TrainedRank], reference: StepMeasurements, *, within: float) -> None:
    """Every rank of a cell found what the reference says."""
    for rank, result in enumerate(trained_on_ranks):
        for what, values, expected in (
            ("losses", result.steps.losses, reference.losses),
            ("gradient norms", result.steps.norms, reference.norms),
            ("balancing losses", result.steps.balancing, reference.balancing),
            ("losses of further tokens", result.steps.further, reference.further),
        ):
            np.testing.assert_allclose(values, expected, rtol=within, err_msg=f"{what} of rank {rank}")
    gradients = max((found.gradients for found in trained_on_ranks), key=lambda deviation: deviation.error)
    weights = max((found.weights for found in trained_on_ranks), key=lambda deviation: deviation.error)
    assert gradients.error < 20 * within, f"the gradient of {gradients.name} is off by {gradients.error}"
    assert weights.error < 20 * within, f"the weight {weights.name} is off by {weights.error}"


def relative_errors(trained_on_ranks: Sequence[TrainedRank], reference: StepMeasurements) -> tuple[float, ...]:
    """Return the worst rank's distance from the reference: in losses, gradient norms, gradients and weights."""
    steps = [found.steps for found in trained_on_ranks]
    return (
        max(_relative_error(found.losses, reference.losses) for found in steps),
        max(_relative_error(found.norms, reference.norms) for found in steps),
        max(found.gradients.error for found in trained_on_ranks),
        max(found.weights.error for found in trained_on_ranks),
    )


def _relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    return float(np.abs(np.divide(found, expected) - 1).max())


def update_parameters(cell: Cell, folder: Path) -> set[str]:
    """The parameters that an update of the cell changes."""
    use_cpu()
    try:
        return {piece.name for piece in start_engine(cell, folder).optimizer.pieces}
    finally:
        stop_groups()


def measure_update(cell: Cell, folder: Path) -> Mapping[str, float]:
    """Return the metrics of an update of the cell beside its loss."""
    return first_update(cell, folder).metrics


def first_update(cell: Cell, folder: Path) -> UpdateResult:
    """Return the metrics of the cell's first update on this rank."""
    use_cpu()
    try:
        engine = start_engine(cell, folder)
        return engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
    finally:
        stop_groups()
