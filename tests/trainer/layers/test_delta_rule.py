"""The gated delta rule in documents, against Transformers document by document and against its own recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from moejob_trainer.layers import delta_rule
from moejob_trainer.layers.delta_rule import DeltaInputs, convolve_documents, find_linear_attention, plain_delta_rule
from moejob_trainer.layers.documents import Documents
from trainer.tolerance import assert_all_close

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 7
# Shorter than a chunk, exactly one, one more, several, and a document without tokens.
LENGTHS = (3, 64, 1, 65, 0, 150)


def make_inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random query, key, value, decay and strength."""
    random = torch.Generator().manual_seed(5)
    sizes = ((KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM), (VALUE_HEADS,), (VALUE_HEADS,))
    query, key, value, decay, strength = (torch.randn(tokens, *size, generator=random, dtype=dtype) for size in sizes)
    inputs = [query, key, value, -decay.square(), strength.sigmoid()]
    return [x.detach().requires_grad_() for x in inputs]


def apply_recurrence(inputs: Sequence[Tensor]) -> Tensor:
    """One document by the three lines of the definition."""
    query, key, value, decay, strength = inputs
    shared_by = VALUE_HEADS // KEY_HEADS
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(shared_by, 1) for x in (query, key)
    )
    state = value.new_zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM)
    outputs = []
    for token in range(len(value)):
        state = state * decay[token].exp()[:, None, None]
        missing = value[token] - (key[token][:, None] @ state)[:, 0]
        state = state + key[token][..., None] * (strength[token][:, None] * missing)[:, None]
        outputs.append((query[token][:, None] @ state)[:, 0] * KEY_DIM**-0.5)
    return torch.stack(outputs) if outputs else value[:0]


def apply_transformers(inputs: Sequence[Tensor]) -> Tensor:
    """One document by the code that Transformers falls back to."""
    query, key, value, decay, strength = inputs
    shared_by = VALUE_HEADS // KEY_HEADS
    output: Tensor = modeling_qwen3_next.torch_chunk_gated_delta_rule(
        *(x.repeat_interleave(shared_by, 1)[None] for x in (query, key)),
        value[None],
        g=decay[None],
        beta=strength[None],
        use_qk_l2norm_in_kernel=True,
    )[0][0]
    return output


def in_documents(compute: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor]) -> Tensor:
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    return torch.cat([compute(part) for part in parts if len(part[0])])


def outputs_and_gradients(compute: Callable[[list[Tensor]], Tensor], dtype: torch.dtype) -> list[Tensor]:
    inputs = make_inputs(sum(LENGTHS), dtype)
    output = compute(inputs)
    return [output, *torch.autograd.grad((output * torch.linspace(-1, 1, len(output))[:, None, None]).sum(), inputs)]


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 500])
@pytest.mark.parametrize(
    ("reference", "dtype", "within"),
    [(apply_recurrence, torch.float64, 1e-11), (apply_transformers, torch.float32, 2e-5)],
    ids=["its definition", "Transformers"],
)
def test_packed_documents_are_computed_as_each_alone(
    reference: Callable[[Sequence[Tensor]], Tensor], dtype: torch.dtype, within: float, chunk_tokens: int
) -> None:
    documents = Documents.from_lengths(LENGTHS)
    expected = outputs_and_gradients(lambda inputs: in_documents(reference, inputs), dtype)
    actual = outputs_and_gradients(
        lambda inputs: plain_delta_rule(DeltaInputs(*inputs), documents, chunk_tokens), dtype
    )
    assert_all_close(actual, expected, within=within)


def test_a_state_that_crosses_a_border_is_seen() -> None:
    inputs = make_inputs(sum(LENGTHS))
    apart = plain_delta_rule(DeltaInputs(*inputs), Documents.from_lengths(LENGTHS))
    together = plain_delta_rule(DeltaInputs(*inputs), Documents.from_lengths((sum(LENGTHS),)))
    assert torch.equal(apart[: LENGTHS[0]], together[: LENGTHS[0]])
    assert (apart - together)[LENGTHS[0] :].abs().max() > 0.01


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_a_convolution_begins_again_at_each_document(width: int) -> None:
    random = torch.Generator().manual_seed(6)
    x = torch.randn(sum(LENGTHS), 11, generator=random, dtype=torch.float64)
    weight = torch.randn(11, width, generator=random, dtype=torch.float64)
    expected = [
        modeling_qwen3_next.causal_conv1d_fn(part.T[None], weight, activation="silu")[0].T
        for part in x.split(LENGTHS)
        if len(part)
    ]
    actual = convolve_documents(x, weight, Documents.from_lengths(LENGTHS))
    torch.testing.assert_close(actual, torch.cat(expected), rtol=1e-12, atol=1e-12)


def test_a_row_cut_between_context_ranks_is_refused() -> None:
    documents = Documents.from_lengths((4, 4), context_size=2)
    with pytest.raises(ValueError, match="cut over 2 context ranks has no state"):
        convolve_documents(torch.ones(4, 3), torch.ones(3, 2), documents)


def test_a_host_never_asks_for_kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "find_spec", lambda _: pytest.fail("looked for"))
    assert find_linear_attention(torch.ones(1)) is None
