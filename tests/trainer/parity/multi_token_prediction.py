"""Multi-token prediction by hand: DeepSeek-V3's report in float64, on the layers of Transformers, which has none of it.

Module k makes of h_i, which the model or the module before gave to the output layer, and of the token k further on
    h'_i = M [norm(embedding of t_(i+k)); norm(h_i)]    for i from 1 to T - k,
sends it through a layer and a norm, and the model's own output layer says from it what t_(i+k+1) is. The loss of module
k is the sum of these cross-entropies over what the loss of the next tokens is divided by, and all modules together add
the coefficient times their mean. Nothing of the trainer is used here but the names of tensors in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from moejob_api.models.shape import Family
from moejob_trainer.training import Document
from trainer.parity.balancing import LENGTHS as BALANCED_LENGTHS
from trainer.parity.balancing import UNGROUPED, Choices, Expected, Rules, WatchedModel, balancing_loss, move_biases
from trainer.parity.cells import (
    LENGTHS,
    StepMeasurements,
    descend_gradients,
    make_documents,
    parameter_groups,
    reference_model,
    save_gradients,
)

LAYERS, MODULES = 4, 2
COEFFICIENT = 0.3


@dataclass(frozen=True)
class ModulePrediction:
    """Output of one module for all documents: the sum of its weighted losses, and of their weights."""

    loss: Tensor
    weight: float


class Module(nn.Module):
    """Parameters of a module beside its layer, under the names of published files."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        hidden, kind = model.config.hidden_size, type(model.model.norm)
        self.enorm, self.hnorm = (kind(hidden, model.config.rms_norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": kind(hidden, model.config.rms_norm_eps)})
        for parameter in self.parameters():
            nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.1)


class FurtherReference:
    """A model whose last layers belong to modules that predict further tokens."""

    def __init__(self, family: Family, **changes: Any) -> None:
        layers = {"num_hidden_layers": LAYERS + MODULES, "num_nextn_predict_layers": 0}
        self.model = reference_model(family, **layers, **changes)
        # Transformers runs this many of its layers.
        self.model.config.num_hidden_layers, self.model.config.num_nextn_predict_layers = LAYERS, MODULES
        if family is Family.GLM4_MOE_LITE:
            self.model.config.mlp_layer_types = self.model.config.mlp_layer_types[:LAYERS]
        self.modules = nn.ModuleList([Module(self.model) for _ in range(MODULES)])
        # One model, so that everything is trained and its norm clipped together.
        self.model.further = self.modules

    def save(self, folder: Path) -> None:
        """As published: modules are further layers."""
        del self.model.further
        self.model.save_pretrained(folder)
        self.model.further = self.modules
        file = folder / "model.safetensors"
        beside = {
            f"model.layers.{LAYERS + number}.{name}": tensor.detach().clone()
            for number, module in enumerate(self.modules)
            for name, tensor in module.state_dict().items()
        }
        save_file(load_file(file) | beside, file, {"format": "pt"})

    def save_gradients(self, folder: Path) -> None:
        """The same of gradients."""
        save_gradients(self.model, folder, save=self.save)

    def compute_losses(self, document: Document) -> Iterator[Tensor]:
        """Weighted losses of the next tokens, then of the further ones of each module."""
        tokens, weights = torch.from_numpy(document.tokens), torch.from_numpy(document.weights)
        hidden = self.model.model(tokens[None], use_cache=False).last_hidden_state[0]
        yield self._losses(hidden, tokens, weights, 1)
        for further, module in enumerate(self.modules, 1):
            if further < len(tokens):
                hidden = self._further(module, LAYERS + further - 1, hidden[: len(tokens) - further], tokens[further:])
                yield self._losses(hidden, tokens, weights, further + 1)

    def _further(self, module: Any, layer: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        inner = self.model.model
        both = torch.cat([module.enorm(inner.embed_tokens(tokens)), module.hnorm(hidden)], dim=-1)
        x = module.eh_proj(both)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((1, 1, len(tokens), len(tokens)), -torch.inf, dtype=x.dtype).triu(1)
        angles = inner.rotary_emb(x, position_ids=positions)
        x = inner.layers[layer](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        found: Tensor = module.shared_head["norm"](x)[0]
        return found

    def _losses(self, hidden: Tensor, tokens: Tensor, weights: Tensor, by: int) -> Tensor:
        logits = self.model.lm_head(hidden[: len(tokens) - by])
        return cross_entropy(logits, tokens[by:], reduction="none") * weights[by:]


def write_further_reference(family: Family, folder: Path, rules: Rules | None = None, **changes: Any) -> Expected:
    """Trains all of it. Leaves behind what `write_reference` does; `rules` say what is done about the load."""
    reference = FurtherReference(family, **changes, **(UNGROUPED if rules else {}))
    reference.save(folder / "first")
    model = reference.model.double()
    watched = WatchedModel(model)
    losses, balancing, further = [], [], []

    def backward(step: int) -> None:
        loss, predicted, choices = _losses(reference, watched, step, BALANCED_LENGTHS if rules else LENGTHS)
        balance = balancing_loss(rules, choices) if rules else torch.zeros(())
        (loss + COEFFICIENT * predicted[0] + balance).backward()
        losses.append(loss.item())
        balancing.append(balance.item())
        further.append(predicted[1].item())
        move_biases(watched, choices, rules.bias_rate if rules else 0.0)

    norms = descend_gradients(parameter_groups(model), backward, lambda: reference.save_gradients(folder / "gradients"))
    reference.save(folder / "last")
    biases = [getattr(router, "e_score_correction_bias", torch.zeros(0)).tolist() for router in watched.routers]
    return Expected(StepMeasurements(tuple(losses), norms, tuple(balancing), tuple(further)), biases)


def _losses(
    reference: FurtherReference, watched: WatchedModel, step: int, lengths: Sequence[int]
) -> tuple[Tensor, tuple[Tensor, Tensor], list[list[Choices]]]:
    """The loss of the next tokens; of later ones, as learned and as reported; what routers chose, by layer."""
    batch = make_documents(step, lengths)
    weight = sum(float(document.weights[1:].sum()) for document in batch)
    sums = torch.zeros(1 + MODULES, dtype=torch.float64)
    said = []
    for document in batch:
        with watched.listen_to_routers() as heard:
            for by, losses in enumerate(reference.compute_losses(document)):
                sums = sums + torch.nn.functional.one_hot(torch.tensor(by), 1 + MODULES) * losses.sum()
        # Modules see nothing of what is too short for them.
        nothing = Choices(heard[0].logits[:0], heard[0].chosen[:0])
        said.append([*heard, *[nothing] * (len(watched.routers) - len(heard))])
    further = sum(float(document.weights[1 + by :].sum()) for document in batch for by in range(1, 1 + MODULES))
    by_layer = [[of_document[layer] for of_document in said] for layer in range(len(watched.routers))]
    return sums[0] / weight, (sums[1:].mean() / weight, sums[1:].sum() / further), by_layer
