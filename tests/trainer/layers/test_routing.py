"""Routers and blocks of experts, against the modules of Transformers; balancing against its definitions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from torch import Tensor, nn
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Experts, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts, DeepseekV3TopkRouter
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeExperts, Glm4MoeTopkRouter
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts, Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from moejob_trainer.layers.activation import clamped_swiglu, swiglu
from moejob_trainer.layers.experts import add_biases, grouped_linear
from moejob_trainer.layers.permutation import Permutation, combine_rows, permute_probabilities, permute_tokens
from moejob_trainer.layers.routing import (
    Routing,
    Scoring,
    balancing_scores,
    document_counts,
    drop_beyond_capacity,
    expert_capacity,
    expert_load,
    route_tokens,
    router_logits,
    sequence_loss,
    switch_loss,
    updated_selection_bias,
    z_loss,
)
from trainer.tolerance import assert_all_close

# A router and experts, whose attributes torch cannot type.
Modules = tuple[Any, Any]

HIDDEN, WIDTH, EXPERTS, TOKENS = 16, 8, 8, 25
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 3}
PLAIN = Routing(EXPERTS, 3)
SIGMOID = Routing(EXPERTS, 3, Scoring.SIGMOID, renormalized=True, scale=2.5, groups=4, kept_groups=2)
SIGMOID_CONFIG: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
GROUPED_V2: dict[str, Any] = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}


def mixtral() -> Modules:
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=3
    )
    return MixtralTopKRouter(config), MixtralExperts(config)


def qwen2(**options: Any) -> Modules:
    config = Qwen2MoeConfig(num_experts=EXPERTS, **SIZES, **options)
    return Qwen2MoeTopKRouter(config), Qwen2MoeExperts(config)


def qwen3(**options: Any) -> Modules:
    config = Qwen3MoeConfig(num_experts=EXPERTS, **SIZES, **options)
    return Qwen3MoeTopKRouter(config), Qwen3MoeExperts(config)


def deepseek_v2(**options: Any) -> Modules:
    config = DeepseekV2Config(
        n_routed_experts=EXPERTS, num_attention_heads=2, routed_scaling_factor=16.0, **SIZES, **options
    )
    return DeepseekV2TopkRouter(config), DeepseekV2Experts(config)


def deepseek_v3() -> Modules:
    config = DeepseekV3Config(norm_topk_prob=True, **SIZES, **SIGMOID_CONFIG)
    return DeepseekV3TopkRouter(config), DeepseekV3Experts(config)


def glm4(**options: Any) -> Modules:
    config = Glm4MoeConfig(**SIZES, **{**SIGMOID_CONFIG, **options})
    return Glm4MoeTopkRouter(config), Glm4MoeExperts(config)


def gpt_oss() -> Modules:
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=3)
    return GptOssTopKRouter(config), GptOssExperts(config)


FAMILIES = [
    pytest.param(mixtral, {}, replace(PLAIN, renormalized=True), id="Mixtral"),
    pytest.param(qwen2, {"norm_topk_prob": False}, PLAIN, id="Qwen2-MoE"),
    pytest.param(qwen3, {"norm_topk_prob": True}, replace(PLAIN, renormalized=True), id="Qwen3-MoE"),
    pytest.param(qwen3, {"norm_topk_prob": False}, PLAIN, id="Qwen3-MoE, not renormalized"),
    pytest.param(deepseek_v2, {"topk_method": "greedy"}, replace(PLAIN, scale=16.0), id="DeepSeek-V2 Lite"),
    pytest.param(deepseek_v2, GROUPED_V2, replace(PLAIN, scale=16.0, groups=4, kept_groups=2), id="DeepSeek-V2"),
    pytest.param(deepseek_v3, {}, SIGMOID, id="DeepSeek-V3"),
    pytest.param(glm4, {"norm_topk_prob": True}, SIGMOID, id="GLM-4.5"),
    pytest.param(
        glm4,
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        replace(SIGMOID, renormalized=False, groups=1, kept_groups=1),
        id="GLM, one group, not renormalized",
    ),
    pytest.param(gpt_oss, {}, replace(PLAIN, scoring=Scoring.SELECTED_SOFTMAX), id="gpt-oss"),
]


def filled(*modules: nn.Module) -> None:
    """Transformers leaves some of them empty, others zero."""
    for module in modules:
        for tensor in [*module.parameters(), *module.buffers()]:
            nn.init.normal_(tensor.detach(), std=0.5)


def ours(router: Any, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    logits = router_logits(x, router.weight, getattr(router, "bias", None))
    return route_tokens(logits, routing, selection_bias=getattr(router, "e_score_correction_bias", None))


def by_expert(experts: Tensor, probabilities: Tensor) -> Tensor:
    """[t, E]: the order among a token's choices means nothing."""
    return torch.zeros(len(experts), EXPERTS, dtype=probabilities.dtype).scatter(1, experts, probabilities)


@pytest.mark.parametrize(("build", "options", "routing"), FAMILIES)
def test_a_router_is_that_of_transformers(build: Any, options: dict[str, Any], routing: Routing) -> None:
    router, _ = build(**options)
    filled(router)
    x, upstream = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    _, weights, chosen = router(x)
    expected = by_expert(chosen, weights)
    experts, probabilities = ours(router, x, routing)
    actual = by_expert(experts, probabilities)
    assert experts.dtype is torch.int64
    assert torch.equal(actual != 0, expected != 0)
    parameters = list(router.parameters())
    gradients = [torch.autograd.grad(weights, parameters, upstream) for weights in (actual, expected)]
    assert_all_close([actual, *gradients[0]], [expected, *gradients[1]], within=2e-6)


@pytest.mark.parametrize(("build", "options", "routing"), FAMILIES)
@pytest.mark.parametrize("where", ["in the activation", "in the sum"])
def test_a_block_of_experts_is_that_of_transformers(
    build: Any, options: dict[str, Any], routing: Routing, where: str
) -> None:
    router, experts = build(**options)
    filled(router, experts)
    experts.config._experts_implementation = "eager"  # noqa: SLF001
    x, upstream = torch.randn(TOKENS, HIDDEN).requires_grad_(), torch.randn(TOKENS, HIDDEN)
    parameters = [x, *router.parameters(), *experts.parameters()]
    if isinstance(experts, GptOssExperts) and where == "in the activation":
        # A bias behind the activation has to be weighted too.
        where = "in the sum"
    _, weights, chosen = router(x)
    expected = experts(x, chosen, weights)
    actual = _through(experts, x, *ours(router, x, routing), in_sum=where == "in the sum")
    gradients = [torch.autograd.grad(output, parameters, upstream) for output in (actual, expected)]
    assert_all_close([actual, *gradients[0]], [expected, *gradients[1]], within=5e-6)


def _through(experts: Any, x: Tensor, chosen: Tensor, probabilities: Tensor, *, in_sum: bool) -> Tensor:
    permutation = Permutation.from_choices(chosen, EXPERTS)
    rows = permute_tokens(x, permutation)
    if isinstance(experts, GptOssExperts):
        weight, bias = (p.unflatten(1, (WIDTH, 2)).transpose(1, 2) for p in _gate_up(experts))
        gate_up = grouped_linear(rows, weight.flatten(1, 2), permutation.bounds)
        gate_up = add_biases(gate_up, bias.flatten(1), permutation.bounds)
        hidden = clamped_swiglu(gate_up.unflatten(1, (2, WIDTH)))
        down = grouped_linear(hidden, experts.down_proj.transpose(1, 2), permutation.bounds)
        down = add_biases(down, experts.down_proj_bias, permutation.bounds)
        return combine_rows(down, permutation, probabilities)
    gate_up = grouped_linear(rows, experts.gate_up_proj, permutation.bounds).unflatten(1, (2, WIDTH))
    hidden = swiglu(gate_up, None if in_sum else permute_probabilities(probabilities, permutation))
    down = grouped_linear(hidden, experts.down_proj, permutation.bounds)
    return combine_rows(down, permutation, probabilities if in_sum else None)


def _gate_up(experts: Any) -> tuple[Tensor, Tensor]:
    return experts.gate_up_proj.transpose(1, 2), experts.gate_up_proj_bias


@pytest.mark.parametrize(
    "routing",
    [
        pytest.param(PLAIN, id="softmax"),
        pytest.param(replace(PLAIN, renormalized=True, scale=2.0), id="softmax, renormalized"),
        pytest.param(SIGMOID, id="sigmoid"),
        pytest.param(replace(PLAIN, scoring=Scoring.SELECTED_SOFTMAX), id="selected softmax"),
    ],
)
def test_numerical_gradients_of_weights_agree(routing: Routing) -> None:
    logits = torch.randn(4, EXPERTS).double().requires_grad_()
    wide = replace(routing, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: route_tokens(logits, wide)[1], [logits])


@pytest.mark.parametrize("scoring", list(Scoring))
def test_a_replayed_choice_is_taken_and_weighted_anew(scoring: Scoring) -> None:
    routing, logits = Routing(EXPERTS, 3, scoring, renormalized=True), torch.randn(TOKENS, EXPERTS)
    chosen, weights = route_tokens(logits, routing)
    again, same = route_tokens(logits, routing, chosen=chosen)
    assert torch.equal(again, chosen)
    assert torch.equal(same, weights)
    other, others = route_tokens(logits, routing, chosen=(chosen + 1) % EXPERTS)
    assert torch.equal(other, (chosen + 1) % EXPERTS)
    assert torch.allclose(others.sum(-1), torch.ones(TOKENS))


def test_scores_are_computed_in_the_precision_that_is_asked_for() -> None:
    logits = torch.randn(TOKENS, EXPERTS).bfloat16()
    assert route_tokens(logits, PLAIN)[1].dtype is torch.float32
    assert route_tokens(logits, replace(PLAIN, dtype=torch.float64))[1].dtype is torch.float64
    x, weight = torch.randn(TOKENS, HIDDEN).bfloat16(), torch.randn(EXPERTS, HIDDEN).bfloat16()
    assert torch.equal(router_logits(x, weight, dtype=torch.float32), x.float() @ weight.float().t())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"groups": 3}, "8 experts cannot be 3 groups", id="uneven groups"),
        pytest.param({"groups": 2, "kept_groups": 3}, "of which 3 are kept", id="more groups kept than there are"),
        pytest.param({"per_token": 9}, "cannot choose 9 of 8", id="more experts than there are"),
        pytest.param({"groups": 4, "kept_groups": 1}, "cannot choose 3 of 2", id="more experts than a group has"),
    ],
)
def test_impossible_routings_are_refused(changes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        replace(PLAIN, **changes)  # type: ignore[arg-type]


@given(st.permutations(range(EXPERTS)), st.sampled_from(list(Scoring)))
def test_renaming_experts_renames_choices(names: list[int], scoring: Scoring) -> None:
    routing, logits, order = (
        Routing(EXPERTS, 3, scoring, renormalized=True),
        torch.randn(5, EXPERTS),
        torch.tensor(names),
    )
    renamed = torch.empty_like(logits)
    renamed[:, order] = logits
    weights = by_expert(*route_tokens(logits, routing))
    assert torch.allclose(by_expert(*route_tokens(renamed, routing))[:, order], weights, atol=1e-6)


def expert_counts(experts: Tensor, expert_count: int, counted: Tensor | None = None) -> Tensor:
    """Choices that fell on each expert, as if all tokens were of one document."""
    return document_counts(experts, torch.zeros_like(experts[:, 0]), 1, expert_count, counted)[0]


def test_the_switch_loss_is_that_of_transformers_over_the_choices_of_a_token() -> None:
    logits = torch.randn(TOKENS, EXPERTS).requires_grad_()
    theirs = torch.as_tensor(load_balancing_loss_func((logits,), EXPERTS, 3))
    loss = switch_loss(
        balancing_scores(logits, PLAIN), expert_counts(route_tokens(logits, PLAIN)[0], EXPERTS), TOKENS, 3
    )
    gradients = [torch.autograd.grad(loss, logits)[0] * 3, torch.autograd.grad(theirs, logits)[0]]
    assert_all_close([loss * 3, gradients[0]], [theirs, gradients[1]], within=1e-6)


def test_padding_takes_no_part_in_the_switch_loss() -> None:
    logits, counted = torch.randn(TOKENS, EXPERTS), torch.arange(TOKENS) < 20
    theirs = torch.as_tensor(load_balancing_loss_func((logits,), EXPERTS, 3, counted[None].long()))
    counts = expert_counts(route_tokens(logits, PLAIN)[0], EXPERTS, counted)
    loss = switch_loss(balancing_scores(logits, PLAIN) * counted[:, None], counts, 20, 3)
    assert_all_close([loss * 3], [theirs], within=1e-6)


@given(st.integers(1, TOKENS - 1))
def test_balancing_losses_of_parts_add_up_to_that_of_the_whole(cut: int) -> None:
    logits, segments = torch.randn(TOKENS, EXPERTS), (torch.arange(TOKENS) >= 11).int()
    chosen, scores = route_tokens(logits, PLAIN)[0], balancing_scores(logits, PLAIN)
    counts, lengths = document_counts(chosen, segments, 2, EXPERTS), torch.tensor([11, TOKENS - 11])
    parts = [slice(0, cut), slice(cut, TOKENS)]
    assert torch.equal(torch.stack([expert_counts(chosen[part], EXPERTS) for part in parts]).sum(0), counts.sum(0))
    for whole, pieces in (
        (
            switch_loss(scores, counts.sum(0), TOKENS, 3),
            [switch_loss(scores[p], counts.sum(0), TOKENS, 3) for p in parts],
        ),
        (
            sequence_loss(scores, counts, lengths, segments, 3),
            [sequence_loss(scores[p], counts, lengths, segments[p], 3) for p in parts],
        ),
        (z_loss(logits, TOKENS), [z_loss(logits[p], TOKENS) for p in parts]),
    ):
        assert torch.allclose(whole, torch.stack(pieces).sum(), rtol=1e-5)


def test_the_sequence_loss_is_the_switch_loss_of_each_document() -> None:
    logits = torch.randn(TOKENS, EXPERTS).requires_grad_()
    # The second document is empty.
    lengths = [11, 0, TOKENS - 11]
    segments = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).int()
    chosen, scores = route_tokens(logits, PLAIN)[0], balancing_scores(logits, PLAIN)
    counts = document_counts(chosen, segments, 3, EXPERTS)
    loss = sequence_loss(scores, counts, torch.tensor(lengths), segments, 3)
    apart = [
        switch_loss(part, expert_counts(picked, EXPERTS), len(part), 3)
        for part, picked in zip(scores.split(lengths), chosen.split(lengths), strict=True)
        if len(part)
    ]
    expected = torch.stack(apart).sum()
    gradients = [torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (loss, expected)]
    assert_all_close([loss, gradients[0]], [expected, gradients[1]], within=1e-6)


@pytest.mark.parametrize("scoring", list(Scoring))
def test_a_balanced_load_has_a_loss_of_one(scoring: Scoring) -> None:
    routing = Routing(EXPERTS, 2, scoring)
    scores = balancing_scores(torch.zeros(EXPERTS, EXPERTS), routing)
    assert torch.allclose(scores.sum(-1), torch.ones(EXPERTS))
    assert switch_loss(scores, torch.full((EXPERTS,), 2.0), EXPERTS, 2).item() == pytest.approx(1.0)


def test_the_z_loss_is_the_mean_square_of_the_normaliser() -> None:
    logits, counted = torch.randn(6, EXPERTS), torch.tensor([1, 1, 0, 1, 0, 1]).bool()
    expected = torch.log(logits.double().exp().sum(-1)).square()
    assert_all_close([z_loss(logits, 6)], [expected.mean()], within=1e-6)
    assert_all_close([z_loss(logits, 4, counted)], [expected[counted].mean()], within=1e-6)


def test_an_expert_over_its_capacity_keeps_who_wants_it_the_most() -> None:
    experts = torch.tensor([[0, 1], [0, 2], [0, 1]])
    probabilities = torch.tensor([[0.5, 0.1], [0.2, 0.3], [0.9, 0.4]])
    kept, weights = drop_beyond_capacity(experts, probabilities, 2, 3)
    assert kept.tolist() == [[0, 1], [3, 2], [0, 1]]
    assert torch.equal(weights, probabilities * torch.tensor([[1, 1], [0, 1], [1, 1]]))
    assert expert_counts(kept, 3).tolist() == [2, 2, 1]


@given(st.integers(1, 12))
def test_nothing_is_dropped_below_capacity_and_nothing_kept_above(most: int) -> None:
    experts, probabilities = route_tokens(torch.randn(TOKENS, EXPERTS), PLAIN)
    kept, weights = drop_beyond_capacity(experts, probabilities, most, EXPERTS)
    assert torch.equal(expert_counts(kept, EXPERTS), expert_counts(experts, EXPERTS).clamp(max=most))
    dropped = kept == EXPERTS
    assert torch.equal(weights, probabilities * ~dropped)
    for expert in range(EXPERTS):
        lost, won = probabilities[dropped & (experts == expert)], probabilities[kept == expert]
        assert not len(lost) or lost.max() <= won.min()


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.25, 2.0, 4.0])
def test_megatron_keeps_the_same_choices_within_the_same_capacity(factor: float) -> None:
    probabilities, experts = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(PLAIN.per_token)
    spread = torch.zeros(TOKENS, EXPERTS).scatter(1, experts, probabilities)
    theirs, _ = apply_router_token_dropping(spread, spread > 0, PLAIN.per_token, factor)
    most = expert_capacity(torch.tensor(TOKENS), PLAIN, factor)
    kept, weights = drop_beyond_capacity(experts, probabilities, most, EXPERTS)
    assert torch.equal(torch.zeros(TOKENS, EXPERTS + 1).scatter(1, kept, weights)[:, :EXPERTS], theirs)


def test_dropped_choices_reach_no_expert() -> None:
    experts, probabilities = route_tokens(torch.randn(TOKENS, EXPERTS), PLAIN)
    kept, weights = drop_beyond_capacity(experts, probabilities, 4, EXPERTS)
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(EXPERTS, HIDDEN, HIDDEN)
    permutation = Permutation.from_choices(kept, EXPERTS, rows=int((kept < EXPERTS).sum()))
    rows = grouped_linear(permute_tokens(x, permutation), weight, permutation.bounds)
    expected = torch.einsum("te,eoh,th->to", by_expert(experts, weights), weight, x)
    assert_all_close([combine_rows(rows, permutation, weights)], [expected], within=2e-6)


@pytest.mark.parametrize(("factor", "most"), [(1.0, 10), (1.25, 12), (1.3, 13), (0.01, 1)])
def test_capacity_is_a_share_of_the_choices_rounded_up(factor: float, most: int) -> None:
    assert expert_capacity(torch.tensor(25), PLAIN, factor) == most


def test_the_selection_bias_moves_towards_idle_experts() -> None:
    moved = updated_selection_bias(torch.zeros(4), torch.tensor([10.0, 0.0, 5.0, 5.0]), 0.1)
    assert torch.allclose(moved, torch.tensor([-0.1, 0.1, 0.0, 0.0]))


@pytest.mark.parametrize(
    ("counts", "imbalance", "idle", "entropy"),
    [
        pytest.param([5, 5, 5, 5], 1.0, 0, 1.0, id="balanced"),
        pytest.param([20, 0, 0, 0], 4.0, 3, 0.0, id="one expert has all"),
        pytest.param([10, 10, 0, 0], 2.0, 2, 0.5, id="half of them idle"),
        pytest.param([0, 0, 0, 0], 0.0, 4, 0.0, id="nothing yet"),
    ],
)
def test_the_load_says_how_even_it_is(counts: list[int], imbalance: float, idle: int, entropy: float) -> None:
    seen = expert_load(torch.tensor(counts))
    assert seen.imbalance.item() == pytest.approx(imbalance)
    assert seen.idle_experts.item() == idle
    assert seen.entropy.item() == pytest.approx(entropy)
