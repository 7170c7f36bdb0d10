"""Weights of a model that is not published yet: where Transformers begins, it begins."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from builders import spec
from model_configs import config
from moejob_api.models.shape import Family
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.megatron.weights import initialise_weights, named_weights
from moejob_trainer.model.architecture import read_architecture
from moejob_trainer.model.parameters import model_parameters
from moejob_trainer.model.stage import Stage, StagePlace


def fresh_weights(family: Family) -> dict[str, Tensor]:
    """Return the weights of a whole model on one rank, by their names without the layer's number."""
    model = read_architecture(config(family))
    stage = Stage(model, spec(model={"dtype": "float32"}), Groups(), StagePlace(range(5), True, True))
    initialise_weights([stage], model_parameters(model.shape), Groups(), seed=3)
    return dict(named_weights([stage]))


def test_norms_begin_with_a_factor_of_one() -> None:
    for family, distance in ((Family.QWEN3_MOE, 1.0), (Family.QWEN3_NEXT, 0.0)):
        weights = fresh_weights(family)
        norms = {name: tensor for name, tensor in weights.items() if name.endswith("norm.weight")}
        zero_centred = {name: tensor for name, tensor in norms.items() if not name.endswith("state_norm.weight")}
        assert {value for tensor in zero_centred.values() for value in tensor.tolist()} == {distance}
        assert all((tensor == 1).all() for name, tensor in norms.items() if name not in zero_centred)


def test_states_of_linear_attention_begin_to_decay_as_those_of_transformers() -> None:
    weights = fresh_weights(Family.QWEN3_NEXT)
    decays = torch.cat([tensor for name, tensor in weights.items() if name.endswith("decay_log")])
    assert math.log(0.01) <= decays.min() < decays.max() <= math.log(16)
    assert len(decays.unique()) == len(decays)
    assert all((tensor == 1).all() for name, tensor in weights.items() if name.endswith("decay_bias"))
