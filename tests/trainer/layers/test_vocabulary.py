"""Log-probabilities straight from hidden states, against the whole softmax."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moejob_trainer.layers import vocabulary
from moejob_trainer.layers.vocabulary import token_log_probabilities
from trainer.layers.references import Words, words_by_definition, words_case, words_here, words_on_rank
from trainer.tolerance import assert_all_close
from trainer.worlds import Worlds

CASES = [
    pytest.param({}, id="some chunks"),
    pytest.param({"chunk_tokens": 1000}, id="one chunk"),
    pytest.param({"tokens": 1}, id="one token"),
    pytest.param({"temperature": 0.7}, id="temperature"),
    pytest.param({"vocabulary": 3}, id="ranks without a word of their own"),
    pytest.param({"vocabulary": 128}, id="no padding"),
    pytest.param({"vocabulary": 1000, "tokens": 40}, id="many words"),
    pytest.param({"learns_entropy": True}, id="entropy"),
    pytest.param({"learns_entropy": True, "temperature": 0.7, "vocabulary": 3}, id="tempered entropy of few words"),
]


BOTH = pytest.mark.parametrize("keeps_slopes", [True, False], ids=["slopes are kept", "logits are computed again"])


@BOTH
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize(
    ("dtype", "within"),
    [(torch.float64, 1e-13), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)],
    ids=["float64", "float32", "bfloat16"],
)
def test_one_rank_says_what_the_whole_softmax_says(
    options: dict[str, Any], dtype: torch.dtype, within: float, keeps_slopes: bool
) -> None:
    case = words_case(dtype=dtype, keeps_slopes=keeps_slopes, **options)
    picked, *others = words_here(case)
    assert picked.dtype is torch.promote_types(dtype, torch.float32)
    assert_all_close([picked, *others], words_by_definition(case), within=within)


@BOTH
@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_ranks_together_say_what_one_says(
    worlds: Worlds, options: dict[str, Any], size: int, keeps_slopes: bool
) -> None:
    case = words_case(keeps_slopes=keeps_slopes, **options)
    picked, entropy, hidden, weight = zip(*worlds.run(size, words_on_rank, case, True), strict=True)
    for rank in range(size):
        together = [picked[rank], entropy[rank], hidden[rank], torch.cat(weight)]
        assert_all_close(together, words_by_definition(case), within=1e-13)


def test_the_caller_can_sum_the_gradient_of_hidden(worlds: Worlds) -> None:
    case = words_case()
    _, _, hidden, _ = zip(*worlds.run(2, words_on_rank, case, False), strict=True)
    assert_all_close([torch.stack(hidden).sum(0)], [words_by_definition(case)[2]], within=1e-13)
    assert not torch.allclose(hidden[0], hidden[1])


@BOTH
def test_numerical_gradients_agree(keeps_slopes: bool) -> None:
    case = words_case(3, 10)
    leaves = [case.hidden.requires_grad_(), case.weight[:16].clone().requires_grad_()]

    def picked(hidden: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"vocabulary": 10, "chunk_tokens": 2, "keeps_slopes": keeps_slopes}
        return token_log_probabilities(hidden, weight, case.labels, **options, temperature=1.3)[0]

    assert torch.autograd.gradcheck(picked, leaves)


def test_numerical_gradients_of_entropy_agree() -> None:
    case = words_case(3, 10)
    leaves = [case.hidden.requires_grad_(), case.weight[:16].clone().requires_grad_()]

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {"vocabulary": 10, "chunk_tokens": 2, "learns_entropy": True}
        return token_log_probabilities(hidden, weight, case.labels, **options, temperature=1.3)

    assert torch.autograd.gradcheck(both, leaves)


@BOTH
def test_a_negative_label_says_nothing(keeps_slopes: bool) -> None:
    case = words_case(keeps_slopes=keeps_slopes)
    case.labels[::3] = -100
    actual = words_here(case)
    assert actual[0][::3].eq(0).all()
    assert actual[2][::3].eq(0).all()
    assert_all_close(actual, words_by_definition(case), within=1e-13)


def test_a_label_that_is_no_word_is_loud() -> None:
    case = words_case(vocabulary=300)
    case.labels[2] = 300
    picked, _ = token_log_probabilities(case.hidden, case.weight, case.labels, vocabulary=300, chunk_tokens=4)
    assert picked.isnan().tolist() == [index == 2 for index in range(11)]


@BOTH
def test_words_beyond_the_vocabulary_get_a_gradient_of_zero(keeps_slopes: bool) -> None:
    assert words_here(words_case(vocabulary=300, keeps_slopes=keeps_slopes))[3][300:].eq(0).all()


@BOTH
def test_large_logits_do_not_overflow(keeps_slopes: bool) -> None:
    case = words_case(keeps_slopes=keeps_slopes)
    case = replace(case, hidden=case.hidden * 1000)
    assert_all_close(words_here(case), words_by_definition(case), within=1e-11)


@BOTH
def test_only_what_needs_a_gradient_gets_one(keeps_slopes: bool) -> None:
    case = words_case(keeps_slopes=keeps_slopes)
    for wanted in (case.hidden, case.weight):
        wanted.requires_grad_()
        picked, entropy = token_log_probabilities(
            case.hidden,
            case.weight,
            case.labels,
            vocabulary=case.vocabulary,
            chunk_tokens=4,
            keeps_slopes=keeps_slopes,
        )
        assert not entropy.requires_grad
        (gradient,) = torch.autograd.grad(picked.sum(), wanted)
        assert gradient.shape == wanted.shape
        wanted.requires_grad = False


def test_expanded_gradients_and_strided_hidden_states_are_fine() -> None:
    case = words_case()
    strided = replace(case, hidden=case.hidden.t().contiguous().t(), upstream=torch.ones(1).double().expand(11))
    assert_all_close(words_here(strided), words_by_definition(strided), within=1e-13)


@given(st.integers(1, 20), st.integers(1, 25), st.integers(1, 300), st.booleans())
@settings(max_examples=60)
def test_chunks_change_nothing(tokens: int, chunk_tokens: int, words: int, keeps_slopes: bool) -> None:
    case = words_case(tokens, words, keeps_slopes=keeps_slopes)
    whole = words_here(replace(case, chunk_tokens=1000))
    assert_all_close(words_here(replace(case, chunk_tokens=chunk_tokens)), whole, within=1e-12)


@pytest.mark.parametrize("tokens", [1, 40])
def test_never_more_logits_at_once_than_were_allowed(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 8 tokens by 1024 words, or by the 128 words of a tile."""
    seen: list[int] = []
    product = vocabulary._wide_product  # noqa: SLF001

    def spied(x: Tensor, y: Tensor) -> Tensor:
        seen.append(x.shape[0] * y.shape[1])
        return product(x, y)

    monkeypatch.setattr(vocabulary, "_wide_product", spied)
    words_here(words_case(tokens, 1000, chunk_tokens=8))
    assert max(seen) <= max(8 * 1024, tokens * 128 * 2)


def test_the_case_itself_would_show_words_that_do_not_exist() -> None:
    case: Words = words_case(vocabulary=300)
    wrong = words_by_definition(replace(case, vocabulary=384))
    assert (wrong[0] - words_by_definition(case)[0]).abs().max() > 1
