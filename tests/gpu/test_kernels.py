"""Every kernel on a GPU beside its plain twin, in bfloat16 and float32, forward and backward.

Bounds are in units of the largest element: 1e-2 in bfloat16 (2e-2 for attention), 2e-6 in float32 (1e-5); and never
more than twice the error of the plain twin itself and a quarter of the bound. Both are measured against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpu.twins import Heads, Place, Twins, assert_kernel, assert_twins, attended, bounds_of
from moejob_trainer.layers import activation, attention, destinations, norm, permutation, rotary, routing
from moejob_trainer.layers.delta_rule import DeltaInputs, apply_delta_rule, find_linear_attention, plain_delta_rule
from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.experts import add_biases, grouped_linear
from moejob_trainer.layers.gradient_sums import find_gradient_sum
from moejob_trainer.layers.kernels import ALIGNMENT_BYTES, find_kernels
from moejob_trainer.layers.kernels.experts import choose_tiles
from moejob_trainer.layers.routing import router_logits
from moejob_trainer.layers.vocabulary import token_log_probabilities

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

PLACES = [
    pytest.param(Place("cuda", torch.bfloat16), id="bfloat16"),
    pytest.param(Place("cuda", torch.float32), id="float32"),
]
BFLOAT16 = Place("cuda", torch.bfloat16)
ROUTING = routing.Routing(8, 2)
# Tensor cores cut off what float32 would round: 2.8e-6 was seen of sums of 2,048 products.
FLOAT32_WITHIN = 5e-6
# Two products of rounded factors: the plain twin rounds attention weights too.
ATTENTION_WITHIN = 2e-2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("weighted", [True, False], ids=["with probabilities", "without"])
@pytest.mark.parametrize(("rows", "width"), [(1000, 768), (77, 1536), (33, 14336), (5, 24), (0, 8)])
@pytest.mark.parametrize("name", ["swiglu", "clamped swiglu"])
def test_gated_activations(place: Place, name: str, rows: int, width: int, weighted: bool) -> None:
    assert_kernel(name, place, rows, width, weighted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "shape", [(4096, 2048), (1000, 32, 128), (70000, 64), (33, 7168), (3, 16384), (5, 24), (0, 8)], ids=str
)
def test_norms(place: Place, shape: tuple[int, ...]) -> None:
    assert_kernel("norm", place, *shape)


@pytest.mark.parametrize(("rows", "width"), [(4096, 2048), (70000, 128)])
def test_gradients_of_norms_are_added_to_their_sum(rows: int, width: int) -> None:
    assert_kernel("norm sums", BFLOAT16, rows, width)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("interleaved", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize(
    ("heads", "dim", "turning"), [(32, 128, 128), (4, 128, 64), (128, 64, 64), (1, 64, 64), (3, 24, 24), (5, 40, 12)]
)
def test_rotary(place: Place, heads: int, dim: int, turning: int, interleaved: bool) -> None:
    assert_kernel("rotary", place, 300, heads, dim, turning, interleaved)


@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("lengths", [(300,), (3, 64, 1, 65, 150), (5, 0, 70)], ids=str)
def test_the_gated_delta_rule(lengths: tuple[int, ...]) -> None:
    documents, tokens = Documents.from_lengths(lengths, device=torch.device("cuda")), sum(lengths)
    query, key = (BFLOAT16.normal(tokens, 2, 128) for _ in range(2))
    strength, decay = torch.rand(tokens, 6, device="cuda").bfloat16(), -torch.rand(tokens, 6, device="cuda")
    leaves = (query, key, BFLOAT16.normal(tokens, 6, 128), decay, strength)
    assert find_linear_attention(query) is not None
    assert find_linear_attention(query.float()) is None
    assert_twins(
        Twins(
            lambda *inputs: apply_delta_rule(DeltaInputs(*inputs), documents),
            lambda *inputs: plain_delta_rule(DeltaInputs(*inputs), documents),
            leaves,
            # It rounds the products of a chunk, and the plain twin nothing but its output.
            luck=1.0,
        ),
        within=ATTENTION_WITHIN,
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dropped", [True, False], ids=["some dropped", "all kept"])
@pytest.mark.parametrize(("tokens", "choices", "width"), [(1000, 8, 2048), (100, 2, 4096), (7, 1, 24), (33, 4, 2880)])
def test_sums_of_rows(place: Place, tokens: int, choices: int, width: int, dropped: bool) -> None:
    assert_kernel("row sums", place, tokens, choices, width, dropped)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dropped", [True, False], ids=["some dropped", "all kept"])
@pytest.mark.parametrize(("tokens", "choices", "width"), [(1000, 8, 2048), (100, 2, 7168), (7, 1, 24), (0, 2, 8)])
def test_rows_of_peers(place: Place, tokens: int, choices: int, width: int, dropped: bool) -> None:
    assert_kernel("peer rows", place, tokens, choices, width, dropped)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(16384, 8, 128), (70000, 4, 4), (300, 1, 1), (7, 2, 300), (4096, 2, 3000)]
)
def test_choices_in_the_order_of_experts(tokens: int, choices: int, experts: int) -> None:
    assert_kernel("order", BFLOAT16, tokens, choices, experts)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "ranks"), [(16384, 8, 32, 4), (4097, 2, 4, 2), (300, 10, 8, 64), (0, 2, 4, 2)]
)
def test_destinations_of_choices(tokens: int, choices: int, experts: int, ranks: int) -> None:
    assert_kernel("sent", BFLOAT16, tokens, choices, experts, ranks)


@pytest.mark.parametrize(("tokens", "choices", "experts"), [(16384, 8, 128), (4, 1, 5), (0, 2, 8)])
def test_choices_are_counted_by_document(tokens: int, choices: int, experts: int) -> None:
    assert_kernel("counts", BFLOAT16, tokens, choices, experts)


@pytest.mark.parametrize(("tokens", "experts"), [(16384, 128), (3, 5), (300, 5000), (0, 8)])
def test_entropies_of_routing(tokens: int, experts: int) -> None:
    assert_kernel("entropies", BFLOAT16, tokens, experts)


@pytest.mark.parametrize(
    ("tokens", "experts", "choices"), [(16384, 128, 8), (4097, 8, 2), (300, 512, 10), (9, 60, 4), (3, 5, 1), (0, 8, 2)]
)
def test_routes_and_their_gradients(tokens: int, experts: int, choices: int) -> None:
    assert_kernel("routed", BFLOAT16, tokens, experts, choices)


@pytest.mark.parametrize(("tokens", "experts"), [(16384, 128), (3, 5), (0, 8)])
def test_parts_of_a_gradient_are_the_gradient(tokens: int, experts: int) -> None:
    assert_kernel("parts", BFLOAT16, tokens, experts)


@pytest.mark.parametrize(("tokens", "experts", "width"), [(5000, 128, 2048), (300, 8, 4096), (7, 60, 24)])
def test_the_router_on_tensor_cores_is_a_float32_product(tokens: int, experts: int, width: int) -> None:
    assert_kernel("router", BFLOAT16, tokens, experts, width)
    x, weight = BFLOAT16.normal(tokens, width), BFLOAT16.normal(experts, width)
    exact = x.double() @ weight.double().t()
    off = (router_logits(x, weight, dtype=torch.float32) - exact).abs().max() / exact.abs().max()
    assert off <= FLOAT32_WITHIN, off


PLAIN_HEADS = [
    pytest.param(Heads(), id="grouped"),
    pytest.param(Heads(groups=8), id="as many key heads as query heads"),
    pytest.param(Heads(groups=1), id="one key head"),
    pytest.param(Heads(dim=64, value_dim=64), id="heads of 64"),
    pytest.param(Heads(dim=24, value_dim=24), id="heads of 24"),
    pytest.param(Heads(groups=8, dim=192, value_dim=128), id="latent attention"),
]
HEADS = [
    *PLAIN_HEADS,
    pytest.param(Heads(window=100), id="window"),
    pytest.param(Heads(dim=64, value_dim=64, sinks=True), id="sinks"),
    pytest.param(Heads(dim=64, value_dim=64, sinks=True, window=100), id="sinks and window"),
]
ROWS = [
    pytest.param((1000, 1, 0, 515, 1, 531), id="documents, some of one token and one of none"),
    pytest.param((2048,), id="one document"),
    pytest.param((512, 512, 512, 512), id="equal documents"),
]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize(
    ("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 4)], ids=["alone", "0 of 2", "1 of 2", "2 of 4"]
)
def test_flash_attention(heads: Heads, lengths: tuple[int, ...], rank: int, size: int) -> None:
    documents = Documents.from_lengths(lengths, device="cuda", context_rank=rank, context_size=size)
    flash = _attention_kernels()
    query, value = (torch.empty(1, 1, dim, device="cuda", dtype=torch.bfloat16) for dim in (heads.dim, heads.value_dim))
    if not flash.can_use_flash(query, value):
        pytest.skip("no flash-attn-4 for this GPU here")
    assert_twins(attended(BFLOAT16, flash.flash_attention, documents, heads), within=ATTENTION_WITHIN)


@pytest.mark.parametrize("heads", PLAIN_HEADS)
@pytest.mark.parametrize("lengths", ROWS)
def test_attention_of_padded_documents(heads: Heads, lengths: tuple[int, ...]) -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor, documents: Documents, **options: Any) -> Tensor:
        output: Tensor = _attention_kernels().padded_attention(q, k, v, documents, scale=options["scale"])
        return output

    assert_twins(
        attended(BFLOAT16, padded, Documents.from_lengths(lengths, device="cuda"), heads), within=ATTENTION_WITHIN
    )


@pytest.mark.parametrize("heads", PLAIN_HEADS)
@pytest.mark.parametrize("lengths", [(2048,), (512, 512, 512, 512)], ids=["one document", "equal documents"])
def test_attention_of_documents_that_are_a_batch(heads: Heads, lengths: tuple[int, ...]) -> None:
    def batched(q: Tensor, k: Tensor, v: Tensor, documents: Documents, **options: Any) -> Tensor:
        output: Tensor = _attention_kernels().batch_attention(q, k, v, documents, scale=options["scale"])
        return output

    assert_twins(
        attended(BFLOAT16, batched, Documents.from_lengths(lengths, device="cuda"), heads), within=ATTENTION_WITHIN
    )


@pytest.mark.parametrize("heads", [*PLAIN_HEADS, pytest.param(Heads(window=100), id="window")])
@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)], ids=["alone", "0 of 2", "1 of 2"])
def test_torch_attention_of_packed_documents(heads: Heads, lengths: tuple[int, ...], rank: int, size: int) -> None:
    documents = Documents.from_lengths(lengths, device="cuda", context_rank=rank, context_size=size)
    found = _attention_kernels()
    query, value = (torch.empty(1, 1, dim, device="cuda", dtype=torch.bfloat16) for dim in (heads.dim, heads.value_dim))
    if not found.can_use_varlen(query, value):
        pytest.skip("torch has no kernel for packed documents of these heads here")

    def packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents, **options: Any) -> Tensor:
        del options["sinks"]
        output: Tensor = found.varlen_attention(q, k, v, documents, **options)
        return output

    assert_twins(attended(BFLOAT16, packed, documents, heads), within=ATTENTION_WITHIN)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_whatever_attention_chooses_is_attention(heads: Heads, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    documents = Documents.from_lengths(lengths, device="cuda")
    within = ATTENTION_WITHIN if dtype is torch.bfloat16 else 1e-5
    assert_twins(attended(Place("cuda", dtype), attention.compute_attention, documents, heads), within=within)


@pytest.mark.parametrize(
    "counts", [[300, 0, 515, 1, 208], [0, 0, 0, 7, 0], [0, 0, 0, 0, 0]], ids=["uneven", "one expert has all", "no rows"]
)
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 768), (64, 24), (24, 10)])
def test_grouped_linear_maps(counts: list[int], inputs: int, outputs: int) -> None:
    bounds = bounds_of(counts, "cuda")

    def one_by_one(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        parts = zip(x.split(counts), weight, bias, strict=True)
        return torch.cat([part @ one.t() + more for part, one, more in parts])

    leaves = (
        BFLOAT16.normal(sum(counts), inputs),
        BFLOAT16.normal(5, outputs, inputs) / inputs**0.5,
        BFLOAT16.normal(5, outputs),
    )

    def at_once(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return add_biases(grouped_linear(x, weight, bounds), bias, bounds)

    assert_twins(Twins(at_once, one_by_one, leaves), within=BFLOAT16.within)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "counts", [[300, 0, 515, 1, 208], [0, 0, 0, 7, 0], [0, 0, 0, 0, 0]], ids=["uneven", "one expert has all", "no rows"]
)
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 1536), (264, 392), (24, 10)])
def test_weight_gradients_are_added_to_their_sum(
    counts: list[int], inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    x, upstream = BFLOAT16.normal(sum(counts), inputs), BFLOAT16.normal(sum(counts), outputs)
    weight = nn.Parameter(BFLOAT16.normal(5, outputs, inputs) / inputs**0.5)
    before = torch.randn(5, outputs, inputs, device="cuda").to(dtype)
    total = before.clone()
    weight.main_grad = total  # type: ignore[attr-defined]
    for _ in range(2):
        output = grouped_linear(x, weight, bounds_of(counts, "cuda"), total=find_gradient_sum(weight))
        output.backward(upstream)
    parts = zip(upstream.double().split(counts), x.double().split(counts), strict=True)
    exact = before.double() + 2 * torch.stack([rows.t() @ part for rows, part in parts])
    off = (total.double() - exact).abs().max() / exact.abs().max()
    # What no grouped kernel takes is multiplied expert by expert, and rounded before it is added.
    is_rounded = dtype is torch.bfloat16 or outputs * x.element_size() % ALIGNMENT_BYTES
    assert off <= (BFLOAT16.within if is_rounded else FLOAT32_WITHIN), off


@dataclass(frozen=True)
class Written:
    """A sum of which nothing is there yet."""

    into: Tensor
    is_new = True

    def target_for(self, _: Tensor) -> Tensor:
        return self.into

    def mark_added(self, _: Tensor) -> None:
        """Autograd is given nothing."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "counts", [[300, 0, 515, 1, 208], [0, 0, 0, 7, 0], [0, 0, 0, 0, 0]], ids=["uneven", "one expert has all", "no rows"]
)
def test_the_first_weight_gradients_are_written_over_what_lies_there(counts: list[int], dtype: torch.dtype) -> None:
    inputs, outputs = 2048, 1536
    x, upstream = BFLOAT16.normal(sum(counts), inputs), BFLOAT16.normal(sum(counts), outputs)
    weight = (BFLOAT16.normal(5, outputs, inputs) / inputs**0.5).requires_grad_()
    into = torch.full((5, outputs, inputs), torch.nan, device="cuda", dtype=dtype)
    grouped_linear(x, weight, bounds_of(counts, "cuda"), total=Written(into)).backward(upstream)
    parts = zip(upstream.double().split(counts), x.double().split(counts), strict=True)
    exact = torch.stack([rows.t() @ part for rows, part in parts])
    off = (into.double() - exact).abs().max() / exact.abs().max().clamp(min=1.0)
    assert off <= (BFLOAT16.within if dtype is torch.bfloat16 else FLOAT32_WITHIN), off


def test_wide_experts_are_multiplied_in_tiles_of_their_own() -> None:
    counts, width = [5000, 0, 7001, 1, 3000], 4096
    chosen = choose_tiles(sum(counts) / len(counts), (width, width), torch.cuda.get_device_capability()[0])
    if chosen is None:
        pytest.skip("tiles of our own are for Hopper")
    test_grouped_linear_maps(counts, width, width)
    test_weight_gradients_are_added_to_their_sum(counts, width, width, torch.bfloat16)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("tokens", "words", "existing"), [(300, 151936, 151936), (40, 50304, 50257), (7, 1000, 999), (5, 129, 3), (0, 8, 8)]
)
@pytest.mark.parametrize("learns_entropy", [False, True], ids=["", "entropy"])
def test_words(place: Place, tokens: int, words: int, existing: int, temperature: float, learns_entropy: bool) -> None:
    # A slope of entropy is a difference of sums over all words: 4.5e-6 was seen, 2e-6 of the plain twin.
    within = FLOAT32_WITHIN if learns_entropy and place.dtype is torch.float32 else place.within
    assert_kernel("words", place, tokens, words, existing, temperature, learns_entropy, within=within)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("elements", "step", "scale"), [(1, 1, 1.0), (3_000_000, 7, 0.3), (4099, 1000, 1.0)])
def test_steps_of_adamw(place: Place, elements: int, step: int, scale: float) -> None:
    assert_kernel("adamw", place, elements, step, scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("elements", [1, 4099, 3_000_000])
def test_two_shares_are_added_to_a_total_and_rounded_once(dtype: torch.dtype, elements: int) -> None:
    total, one, other = Place("cuda", dtype).normal(3, elements)
    expected = (one.float() + other.float() + total.float()).to(dtype)
    # One more, which must stay as it is.
    held = torch.cat([total, total.new_tensor([7.0])])
    find_kernels("sums", total).add_both(held[:elements], one, other)  # type: ignore[union-attr]
    assert torch.equal(held[:elements], expected)
    assert held[-1] == 7.0


@pytest.mark.parametrize("keeps_slopes", [True, False], ids=["slopes are kept", "logits are computed again"])
@pytest.mark.parametrize("chunk_tokens", [64, 10000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities(chunk_tokens: int, temperature: float, keeps_slopes: bool) -> None:
    labels = torch.randint(1000, (300,), device="cuda")

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        options = {"vocabulary": 1000, "chunk_tokens": chunk_tokens, "temperature": temperature}
        return token_log_probabilities(hidden, weight, labels, keeps_slopes=keeps_slopes, **options)[0]  # type: ignore[arg-type]

    def whole(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight[:1000].t() / temperature
        return (
            logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1).gather(1, labels[:, None])[:, 0]
        )

    leaves = (BFLOAT16.normal(300, 256), BFLOAT16.normal(1024, 256) / 16)
    assert_twins(Twins(fused, whole, leaves), within=BFLOAT16.within)


def test_log_probabilities_need_less_memory_than_three_chunks_of_logits() -> None:
    tokens, words, chunk_tokens = 16384, 151936, 2048
    labels = torch.randint(words, (tokens,), device="cuda")
    hidden = BFLOAT16.normal(tokens, 2048).requires_grad_()
    weight = (BFLOAT16.normal(words, 2048) / 45).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    picked, _ = token_log_probabilities(hidden, weight, labels, vocabulary=words, chunk_tokens=chunk_tokens)
    picked.sum().backward()
    # The gradients of both leaves included.
    assert torch.cuda.max_memory_allocated() - before < 3 * chunk_tokens * words * 4


def test_a_tensor_on_a_gpu_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each public function reaches its kernel: without this, all tests above could pass beside an unused kernel."""
    x = BFLOAT16.normal(8, 2, 16)
    cos, sin = rotary.Rotary(16, 100.0).cosines_and_sines(torch.arange(8, device="cuda"))
    chosen = permutation.Permutation.from_choices(torch.zeros(4, 2, device="cuda", dtype=torch.int64), 1)
    row = Documents.from_lengths((8,), device="cuda")
    weight = BFLOAT16.normal(128, 16).requires_grad_()
    calls: dict[tuple[str, str], Callable[[], Tensor]] = {
        ("activation", "swiglu"): lambda: activation.swiglu(x),
        ("activation", "clamped_swiglu"): lambda: activation.clamped_swiglu(x),
        ("norm", "rms_norm"): lambda: norm.rms_norm(x, x[0, 0], 1e-5),
        ("rotary", "rotate_heads"): lambda: rotary.rotate_heads(x, cos, sin),
        ("permutation", "sum_rows"): lambda: permutation.combine_rows(x[:, 0], chosen),
        ("permutation", "order_choices"): lambda: permutation.Permutation.from_choices(chosen.inverse, 8).order,
        ("routing", "split_gradient"): lambda: torch.autograd.grad(_router_logits(weight).sum(), weight)[0],
        ("routing", "route_tokens"): lambda: routing.route_tokens(torch.randn(4, 8, device="cuda"), ROUTING)[1],
        ("destinations", "find_destinations"): lambda: destinations.find_destinations(chosen.inverse, 4, 2)[0],
        ("destinations", "pack_choices"): lambda: destinations.pack_choices(
            chosen.inverse, torch.rand(4, 2, device="cuda"), chosen, 4
        ),
        ("routing", "document_counts"): lambda: routing.document_counts(chosen.inverse, None, 1, 8),
        ("routing", "entropy_sums"): lambda: routing.routing_entropy(torch.ones(4, 8, device="cuda"), ROUTING),
        ("vocabulary", "compute_statistics"): lambda: _log_probabilities(weight),
        ("vocabulary", "compute_slope"): lambda: torch.autograd.grad(_log_probabilities(weight).sum(), weight)[0],
        ("attention", "can_use_flash"): lambda: attention.compute_attention(x, x, x, row, scale=1.0),
    }
    reached: list[str] = []
    for (module, function), call in calls.items():
        loaded = find_kernels(module, x)
        assert loaded is not None, "Triton is not installed"
        with monkeypatch.context() as patch:
            patch.setattr(loaded, function, _noted(getattr(loaded, function), function, reached))
            call()
    assert reached == [function for _, function in calls]


def _router_logits(weight: Tensor) -> Tensor:
    return router_logits(BFLOAT16.normal(8, weight.shape[1]), weight, dtype=torch.float32)


def _log_probabilities(weight: Tensor) -> Tensor:
    words, width = weight.shape
    labels = torch.arange(8, device="cuda")
    return token_log_probabilities(BFLOAT16.normal(8, width), weight, labels, vocabulary=words, chunk_tokens=8)[0]


def _noted(original: Callable[..., Any], name: str, reached: list[str]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        reached.append(name)
        return original(*arguments, **options)

    return call


def _attention_kernels() -> Any:
    return find_kernels("attention", torch.empty(0, device="cuda"))
