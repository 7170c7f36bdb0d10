"""Attention inside documents, against its definition and against Transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers.models.gpt_oss import modeling_gpt_oss

from moejob_trainer.layers import attention
from moejob_trainer.layers.attention import compute_attention
from moejob_trainer.layers.documents import Documents, restore_row_order
from moejob_trainer.layers.kernels.attention import (
    FOR_FEW_SHAPES,
    FOR_MANY_SHAPES,
    batch_attention,
    is_padding_cheap,
    is_regular_batch,
    packed_attention,
    padded_attention,
)
from trainer.layers.references import (
    Attention,
    attention_by_definition,
    attention_case,
    attention_here,
    attention_on_rank,
)
from trainer.tolerance import assert_all_close
from trainer.worlds import Worlds

SHAPES = [
    pytest.param({}, id="grouped"),
    pytest.param({"groups": 4}, id="as many key heads as query heads"),
    pytest.param({"groups": 1}, id="one key head"),
    pytest.param({"dim": 24, "value_dim": 24}, id="heads of 24"),
    pytest.param({"dim": 24, "value_dim": 16, "groups": 4}, id="values narrower than keys"),
    pytest.param({"dim": 8, "value_dim": 12}, id="values wider than keys"),
    pytest.param({"window": 3}, id="window"),
    pytest.param({"window": 1}, id="a window of oneself"),
    pytest.param({"window": 1000}, id="a window longer than all"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"sinks": True, "window": 3, "groups": 1}, id="sinks and window"),
]
LENGTHS = (5, 1, 0, 7, 1, 10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "within"),
    [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)],
    ids=["float64", "float32", "bfloat16"],
)
def test_attention_and_its_gradients_are_what_the_definition_says(
    shape: dict[str, int], dtype: torch.dtype, within: float
) -> None:
    case = attention_case(LENGTHS, dtype=dtype, **shape)
    assert_all_close(attention_here(case), attention_by_definition(case), within=within)


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_of_masked_queries_are_one_attention(shape: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case(LENGTHS, **shape)
    monkeypatch.setattr(attention, "MASKED_QUERIES", 2)
    assert_all_close(attention_here(case), attention_by_definition(case), within=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [2, 4])
def test_context_ranks_together_are_one_rank(worlds: Worlds, shape: dict[str, int], size: int) -> None:
    case = attention_case(LENGTHS, **shape)
    output, q, k, v, *sinks = zip(*worlds.run(size, attention_on_rank, case), strict=True)
    rows = [restore_row_order(torch.cat(parts), size) for parts in (output, q, k, v)]
    # A sink belongs to every rank: each one has its own tokens' share of the gradient.
    together = [*rows, *(torch.stack(parts).sum(0) for parts in sinks)]
    assert_all_close(together, attention_by_definition(case), within=1e-13)


def test_context_ranks_sum_gradients_of_keys_in_bfloat16(worlds: Worlds) -> None:
    case = attention_case((24,), dtype=torch.bfloat16)
    gathered = zip(*worlds.run(4, attention_on_rank, case), strict=True)
    rows = [restore_row_order(torch.cat(parts), 4) for parts in gathered]
    assert_all_close(rows, attention_by_definition(case), within=2e-2)


@pytest.mark.parametrize("shape", [{}, {"window": 2}, {"sinks": True}], ids=["plain", "window", "sinks"])
def test_numerical_gradients_agree(shape: dict[str, int]) -> None:
    case = attention_case((3, 1, 2), heads=2, groups=1, dim=2, value_dim=2, **shape)
    documents = Documents.from_lengths(case.lengths)

    def output(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return compute_attention(q, k, v, documents, scale=case.scale, window=case.window, sinks=sinks)

    assert torch.autograd.gradcheck(output, case.leaves())


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.sampled_from([None, 2]), st.booleans(), st.data())
@settings(max_examples=25)
def test_documents_can_be_packed_in_any_order_or_kept_apart(
    lengths: list[int], window: int | None, sinks: bool, data: st.DataObject
) -> None:
    case = attention_case(tuple(lengths), window=window, sinks=sinks)
    output, q, *_ = attention_here(case)
    order = data.draw(st.permutations(range(len(lengths))))
    apart = [_only(case, index) for index in range(len(lengths))]
    packed = _packed([apart[index] for index in order])
    alone = [attention_here(one) for one in apart]
    assert_all_close(
        [torch.cat([one[0] for one in alone]), torch.cat([one[1] for one in alone])], [output, q], within=1e-12
    )
    repacked = attention_here(packed)
    again = [
        torch.cat([repacked[place].split(packed.lengths)[order.index(i)] for i in range(len(lengths))])
        for place in (0, 1)
    ]
    assert_all_close(again, [output, q], within=1e-12)


def test_a_gradient_of_stride_zero_and_heads_out_of_order_in_memory_are_fine() -> None:
    case = attention_case(LENGTHS)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in (case.q, case.k, case.v))
    output = compute_attention(q, k, v, Documents.from_lengths(LENGTHS), scale=case.scale)
    gradients = torch.autograd.grad(output.sum(), [q, k, v])
    expected = attention_by_definition(replace(case, upstream=torch.ones_like(case.upstream)))
    assert_all_close([output.detach(), *gradients], expected, within=1e-13)


def packed_by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int | None, int | None],
    learnable_sink: Tensor | None,
) -> tuple[Tensor, None]:
    """Compute flash-attn-4's definition, on tensors that need no GPU."""
    assert causal
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    outputs = []
    for one_q, one_k, one_v in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        distance = torch.arange(len(one_q))[:, None] + len(one_k) - len(one_q) - torch.arange(len(one_k))
        left, right = (10**6 if side is None else side for side in window_size)
        hidden = (distance > left) | (distance < -right)
        shared = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(shared, 1) for x in (one_k, one_v))
        scores = (torch.einsum("qnd,knd->nqk", one_q, wide_k) * softmax_scale).masked_fill(hidden, float("-inf"))
        if learnable_sink is not None:
            scores = torch.cat([scores, learnable_sink[:, None, None].expand(-1, len(one_q), 1)], -1)
        outputs.append(torch.einsum("nqk,knd->qnd", scores.softmax(-1)[..., : len(one_k)], wide_v))
    return torch.cat(outputs), None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_kernel_for_packed_sequences_is_told_the_right_ones(shape: dict[str, int], size: int) -> None:
    case = attention_case(LENGTHS, **shape)
    expected = attention_by_definition(case)[0]
    for rank in range(size):
        documents = Documents.from_lengths(LENGTHS, context_rank=rank, context_size=size)
        options: dict[str, Any] = {"scale": case.scale, "window": case.window, "sinks": case.sinks}
        held = documents.row_indices()
        output = packed_attention(packed_by_definition, case.q[held], case.k, case.v, documents, **options)
        assert_all_close([output], [expected[held]], within=1e-13)


@pytest.mark.parametrize("lengths", [(5, 1, 0, 7), (4, 4, 4), (1,)])
def test_documents_padded_to_a_batch_are_the_same_documents(lengths: tuple[int, ...]) -> None:
    case = attention_case(lengths)
    q, k, v = case.leaves()
    output = padded_attention(q, k, v, Documents.from_lengths(lengths), scale=case.scale)
    gradients = torch.autograd.grad(output, [q, k, v], case.upstream)
    assert_all_close([output.detach(), *gradients], attention_by_definition(case), within=1e-13)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (7,)])
def test_equal_documents_are_a_batch_as_they_lie_there(lengths: tuple[int, ...]) -> None:
    case = attention_case(lengths)
    q, k, v = case.leaves()
    output = batch_attention(q, k, v, Documents.from_lengths(lengths), scale=case.scale)
    gradients = torch.autograd.grad(output, [q, k, v], case.upstream)
    assert_all_close([output.detach(), *gradients], attention_by_definition(case), within=1e-13)


@pytest.mark.parametrize(
    ("lengths", "size", "pays"),
    [
        pytest.param((4, 4, 4), 1, True, id="equal documents"),
        pytest.param((4, 3, 2), 1, True, id="nearly equal documents"),
        pytest.param((8, 1, 1), 1, False, id="one long document"),
        pytest.param((4, 4), 2, False, id="a part of the row"),
    ],
)
def test_padding_pays_where_documents_are_alike(lengths: tuple[int, ...], size: int, pays: bool) -> None:
    assert is_padding_cheap(Documents.from_lengths(lengths, context_size=size)) is pays


@pytest.mark.parametrize(
    ("lengths", "size", "are"),
    [
        pytest.param((256, 256), 1, True, id="documents cut at one length"),
        pytest.param((256,), 1, True, id="one document that was cut"),
        pytest.param((256, 128), 1, False, id="documents of two lengths"),
        pytest.param((117, 117), 1, False, id="documents that end by chance alike"),
        pytest.param((256, 256), 2, False, id="a part of the row"),
    ],
)
def test_a_kernel_that_plans_for_each_shape_gets_few(lengths: tuple[int, ...], size: int, are: bool) -> None:
    assert is_regular_batch(Documents.from_lengths(lengths, context_size=size)) is are


@pytest.mark.parametrize("backends", [FOR_FEW_SHAPES, FOR_MANY_SHAPES])
def test_scores_of_all_tokens_with_all_others_come_last(backends: tuple[SDPBackend, ...]) -> None:
    """No memory holds them."""
    assert backends[-1] is SDPBackend.MATH
    assert len(set(backends)) == 4


def test_a_context_group_of_another_size_is_refused() -> None:
    case = attention_case((8,))
    documents = Documents.from_lengths((8,), context_size=2)
    with pytest.raises(ValueError, match="cut for 2 context ranks, but the context group has 1"):
        compute_attention(case.q[:4], case.k[:4], case.v[:4], documents, scale=1.0)


def test_sinks_are_those_of_gpt_oss() -> None:
    case = attention_case((9,), sinks=True)
    q, k, v, sinks = case.leaves()
    module: Any = torch.nn.Module().eval()
    module.num_key_value_groups, module.sinks = 2, torch.nn.Parameter(sinks)
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    output, _ = modeling_gpt_oss.eager_attention_forward(module, query, key, value, mask, scaling=case.scale)
    gradients = torch.autograd.grad(output[0], [q, k, v, module.sinks], case.upstream)
    assert_all_close(attention_here(case), [output[0].detach(), *gradients], within=1e-13)


def _only(case: Attention, index: int) -> Attention:
    parts = [x.split(case.lengths)[index] for x in (case.q, case.k, case.v, case.upstream)]
    return replace(case, q=parts[0], k=parts[1], v=parts[2], upstream=parts[3], lengths=(case.lengths[index],))


def _packed(cases: list[Attention]) -> Attention:
    joined = [torch.cat(parts) for parts in zip(*((c.q, c.k, c.v, c.upstream) for c in cases), strict=True)]
    lengths = tuple(length for case in cases for length in case.lengths)
    return replace(cases[0], q=joined[0], k=joined[1], v=joined[2], upstream=joined[3], lengths=lengths)
