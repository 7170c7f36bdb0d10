"""Training on given choices of experts: in any layout, and by Transformers, whose routers are made to choose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_trainer.data.packing import batch_plan, build_global_batch
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.training import Document, MicroBatch
from moejob_trainer.training.micro_batch import ROUTING, Array
from trainer.parity.cells import (
    STEPS,
    Cell,
    Deviation,
    StepMeasurements,
    TrainedRank,
    descend_gradients,
    make_documents,
    make_loss,
    measure_deviation,
    parameter_groups,
    run_backward,
    save_gradients,
    start_engine,
)

# Makes the choices of a document, [length, routed layers, k], of its number and tokens and the shape of one token.
Choose = Callable[[int, Array, tuple[int, int, int]], Array]


@dataclass(frozen=True)
class ReplayedRank:
    """Results of one rank."""

    trained: TrainedRank
    # Of each step.
    disagreement: tuple[float, ...]
    # The same of the first step, layer by layer; none where nothing was replayed.
    layer_disagreement: tuple[float, ...]
    # Log-probabilities of the first step's documents before it was learned: of those of this rank, by number.
    outputs: dict[int, Array]


def random_choices(number: int, tokens: Array, of: tuple[int, int, int]) -> Array:
    """Experts that no router chose; a token in seven, and the last, routes by itself."""
    layers, experts, per_token = of
    random = np.random.default_rng([9, number, len(tokens), int(tokens[0])])
    found = 1 + random.random((len(tokens), layers, experts)).argsort(-1)[..., :per_token].astype(np.uint8)
    found[random.random(len(tokens)) < 1 / 7] = 0
    found[-1] = 0
    return found


def replayed_documents(step: int, folder: Path) -> list[Document]:
    """The documents of a step, with the choices that the reference in the folder was given."""
    kept = load_file(_choices(folder, step))
    return [replace(each, inputs={ROUTING: kept[str(each.id)]}) for each in make_documents(step)]


def write_choices(folder: Path, step: int, chosen: Mapping[str, Array]) -> None:
    """Keep the choices of a step's documents, by number."""
    save_file({name: np.ascontiguousarray(each) for name, each in chosen.items()}, _choices(folder, step))


def _choices(folder: Path, step: int) -> Path:
    return folder / f"choices-{step}.safetensors"


# --- the reference --------------------------------------------------------------------------------------------------


def write_replayed_reference(folder: Path, choose: Choose) -> StepMeasurements:
    """Trains the model in `first` with Transformers on these choices; leaves behind what `write_reference` does."""
    model = reference_in(folder)
    losses: list[float] = []

    def descend(step: int) -> None:
        routers = _find_routers(model)
        of = len(routers), len(routers[0].weight), model.config.num_experts_per_tok
        chosen = {str(each.id): choose(each.id, each.tokens, of) for each in make_documents(step)}
        write_choices(folder, step, chosen)
        batch = replayed_documents(step, folder)
        losses.append(run_backward(_Replaying(model, batch), batch))

    norms = descend_gradients(
        parameter_groups(model), descend, lambda: save_gradients(model, folder / "gradients", model.save_pretrained)
    )
    model.save_pretrained(folder / "last")
    return StepMeasurements(tuple(losses), norms)


def reference_in(folder: Path) -> Any:
    """The first weights in a folder."""
    return AutoModelForCausalLM.from_pretrained(
        folder / "first", dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def own_choices(model: Any, tokens: Array) -> Array:
    """Return what its routers choose by themselves, and nothing for the last token."""
    seen: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, found: seen.append(found[2].sort(-1).values))
        for router in _find_routers(model)
    ]
    with torch.no_grad():
        model(torch.from_numpy(tokens)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    found: Array = 1 + torch.stack(seen, 1).numpy().astype(np.uint8)
    found[-1] = 0
    return found


def given_log_probabilities(model: Any, document: Document) -> Array:
    """Of each token but the first, on the document's choices. [length - 1]"""
    row = torch.from_numpy(document.tokens)[None]
    with torch.no_grad():
        rows = _Replaying(model, [document])(row, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    found: Array = rows.gather(1, row[0, 1:, None])[:, 0].numpy()
    return found


class _Replaying(nn.Module):
    """A model that replays the choices of one document after another."""

    def __init__(self, model: Any, batch: Sequence[Document]) -> None:
        super().__init__()
        self._model, self._left = model, iter(batch)

    def forward(self, tokens: Tensor, **settings: Any) -> Any:
        """Compute the next document."""
        with force_choices(self._model, next(self._left).inputs[ROUTING]):
            return self._model(tokens, **settings)


@contextmanager
def force_choices(model: Any, choices: Array) -> Iterator[None]:
    """Let routers choose these experts; where they are 0, their own. [t, routed layers, k]"""
    columns = torch.from_numpy(choices.astype(np.int64)).unbind(1)
    hooks = [
        router.register_forward_hook(partial(_replayed, model.config, column))
        for router, column in zip(_find_routers(model), columns, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _replayed(config: Any, choices: Tensor, _: nn.Module, __: Any, said: tuple[Tensor, Tensor, Tensor]) -> Any:
    logits, _weights, own = said
    chosen = torch.where(choices > 0, choices - 1, own)
    scale = getattr(config, "routed_scaling_factor", 1.0)
    scores = logits.float().sigmoid() if hasattr(config, "routed_scaling_factor") else logits.float().softmax(-1)
    weights = scores.gather(-1, chosen)
    if getattr(config, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights * scale, chosen


def _find_routers(model: Any) -> list[Any]:
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


# --- a cell ---------------------------------------------------------------------------------------------------------


def train_replayed(cell: Cell, folder: Path) -> ReplayedRank:
    """Trains the model in the cell's layout on the choices of the reference; one rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        outputs = _outputs(engine, micro_batches(cell, engine, 0, folder))
        results, gradients = [], Deviation()
        for step in range(STEPS):
            results.append(engine.update(micro_batches(cell, engine, step, folder), make_loss(cell, engine)))
            if step == 0:
                gradients = measure_deviation(engine, folder / "gradients", lambda piece: piece.gradient)
        weights = measure_deviation(engine, folder / "last", lambda piece: piece.master.read())
    finally:
        stop_groups()
    steps = StepMeasurements(tuple(one.loss for one in results), tuple(one.gradient_norm for one in results))
    disagreement = tuple(one.metrics.get("routingDisagreement", 0.0) for one in results)
    counts = results[0].expert_counts
    layers = () if counts is None or counts.disagreement is None else tuple(counts.disagreement.tolist())
    return ReplayedRank(TrainedRank(steps, gradients, weights, {}), disagreement, layers, outputs)


def replayed_once(cell: Cell, folder: Path, gradients: Path) -> tuple[float, float, float]:
    """The loss of the first step, how far its gradients are from those in a folder, and the disagreement."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        result = engine.update(micro_batches(cell, engine, 0, folder), make_loss(cell, engine))
        off = measure_deviation(engine, gradients, lambda piece: piece.gradient)
    finally:
        stop_groups()
    return result.loss, off.error, result.metrics["routingDisagreement"]


def micro_batches(cell: Cell, engine: MegatronTrainingEngine, step: int, folder: Path) -> list[MicroBatch]:
    """This data rank's part of a step."""
    mistaken = MISTAKEN.get(cell.mutant, _keep_choices)
    batch = [
        replace(each, inputs={ROUTING: mistaken(each.inputs[ROUTING])}) for each in replayed_documents(step, folder)
    ]
    plan = batch_plan(engine.spec, layout_of(engine.spec.parallelism, 8), pad_token=0)
    return build_global_batch(batch, plan)[engine.groups.data.rank]


def _keep_choices(choices: Array) -> Array:
    return choices


MISTAKEN: dict[str, Callable[[Array], Array]] = {
    "choices of the token before": lambda choices: np.roll(choices, 1, axis=0),
    "choices of the layer before": lambda choices: np.roll(choices, 1, axis=1),
    "nothing replayed": lambda choices: 0 * choices,
}


def _outputs(engine: MegatronTrainingEngine, batches: Sequence[MicroBatch]) -> dict[int, Array]:
    return {
        number: said.log_probabilities[start : start + length - 1].numpy()
        for batch, said in zip(batches, engine.compute_outputs(batches), strict=True)
        for start, length, number in zip(batch.cu_lengths.tolist(), batch.lengths, batch.documents, strict=False)
        if length
    }
