"""Every kernel beside its plain twin: what both compute, forward and backward. Asks for torch and Triton only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as one_by_one

from gpu.exact import CHECKS
from moejob_trainer.layers import activation, attention, norm, permutation, rotary, routing, vocabulary
from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.peer_rows import plain_sum_rows, plain_write_rows
from moejob_trainer.megatron.master_weights import CopiedNumbers, SplitNumbers, split_float32

Function = Callable[..., Tensor]
# What reads logits, and what gives their gradient.
Words = tuple[Function, Function]


@dataclass(frozen=True)
class Twins:
    """Two ways to compute one thing, from leaves that both get a gradient for.

    luck: the part of the tolerance that the plain twin may be nearer to the truth by chance.
    """

    kernel: Function
    plain: Function
    leaves: tuple[Tensor, ...]
    luck: float = 0.25

    def errors(self) -> list[tuple[float, float]]:
        """The kernel's and the plain twin's distance from the plain twin in float64, output first, then gradients.

        In units of the largest element.
        """
        upstream = torch.randn_like(self._outputs(self.plain, self.leaves)[0])
        exact = self._outputs(self.plain, tuple(leaf.double() for leaf in self.leaves), upstream.double())
        plain, kernel = (self._outputs(function, self.leaves, upstream) for function in (self.plain, self.kernel))
        for one, other in zip(plain, kernel, strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
        return [(_distance(k, e), _distance(p, e)) for k, p, e in zip(kernel, plain, exact, strict=True)]

    @staticmethod
    def _outputs(function: Function, leaves: tuple[Tensor, ...], upstream: Tensor | None = None) -> list[Tensor]:
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        output = function(*leaves)
        gradients = () if upstream is None else torch.autograd.grad(output, leaves, upstream)
        return [output.detach(), *gradients]


def assert_twins(twins: Twins, *, within: float) -> None:
    """The kernel is as near to the truth as `within`, and not much further from it than its plain twin is."""
    for place, (kernel, plain) in enumerate(twins.errors()):
        assert kernel <= within, f"output {place} is off by {kernel}, more than {within}; the plain twin by {plain}"
        assert kernel <= 2 * plain + within * twins.luck, (
            f"output {place} is off by {kernel}, but the plain twin by {plain} only"
        )


def _distance(one: Tensor, exact: Tensor) -> float:
    if exact.numel() == 0:
        return 0.0
    return (one.double() - exact).abs().max().item() / max(exact.abs().max().item(), 1e-30)


def bounds_of(counts: Sequence[int], device: str = "cpu") -> Tensor:
    """Return where the rows of each expert begin, and where those of the last one end."""
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Place:
    """Device and type of tensors."""

    device: str
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    @property
    def within(self) -> float:
        return 2e-6 if self.dtype is torch.float32 else 1e-2


def swiglu(place: Place, kernels: Any, rows: int, width: int, weighted: bool) -> Twins:
    probabilities = (torch.rand(rows, device=place.device),) if weighted else ()
    return Twins(
        lambda x, p=None: kernels.swiglu(x, p),
        lambda x, p=None: activation.plain_swiglu(x, p),
        (place.normal(rows, 2, width), *probabilities),
    )


def clamped_swiglu(place: Place, kernels: Any, rows: int, width: int, weighted: bool) -> Twins:
    probabilities = (torch.rand(rows, device=place.device),) if weighted else ()
    # Far enough out to meet every clamp.
    return Twins(
        lambda x, p=None: kernels.clamped_swiglu(x, p, 7.0, 1.702),
        lambda x, p=None: activation.plain_clamped_swiglu(x, p, limit=7.0, steepness=1.702),
        (place.normal(rows, 2, width) * 6, *probabilities),
    )


def rms_norm(place: Place, kernels: Any, *shape: int) -> Twins:
    weight = 1 + place.normal(shape[-1]) / 4
    return Twins(
        lambda x, w: kernels.rms_norm(x, w, 1e-5),
        lambda x, w: norm.plain_rms_norm(x, w, 1e-5),
        (place.normal(*shape), weight),
    )


def rotated(place: Place, kernels: Any, tokens: int, heads: int, dim: int, turning: int, interleaved: bool) -> Twins:
    positions = torch.arange(tokens, device=place.device)
    cos, sin = rotary.Rotary(turning, 10000.0).cosines_and_sines(positions)
    # Heads lie in a larger projection.
    x = place.normal(tokens, heads + 3, dim)[:, 1 : heads + 1]
    return Twins(
        lambda x: kernels.rotate_heads(x, cos, sin, interleaved),
        lambda x: rotary.plain_rotate_heads(x, cos.to(_wide(x)), sin.to(_wide(x)), interleaved=interleaved),
        (x,),
    )


def row_sums(place: Place, kernels: Any, tokens: int, choices: int, width: int, dropped: bool) -> Twins:
    experts = torch.stack([torch.randperm(16)[:choices] for _ in range(tokens)]).to(place.device)
    if dropped:
        experts[::2, 0] = 16
    chosen = permutation.Permutation.from_choices(experts, 16, rows=int((experts < 16).sum()))
    return Twins(
        lambda y: _summed(y, chosen, kernels.sum_rows),
        lambda y: _summed(y, chosen, permutation.plain_sum_token_rows),
        (place.normal(chosen.row_count, width),),
    )


def _summed(y: Tensor, chosen: permutation.Permutation, sums: Function) -> Tensor:
    summed: Tensor = _SumOf.apply(y, chosen, sums)  # type: ignore[no-untyped-call]
    return summed


class _SumOf(torch.autograd.Function):
    """`combine_rows`, by one of the twins."""

    @staticmethod
    def forward(context: Any, y: Tensor, chosen: permutation.Permutation, sums: Function) -> Tensor:
        context.chosen = chosen
        return sums(y, chosen.inverse)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, context.chosen.row_tokens), None, None


def peer_rows(place: Place, kernels: Any, tokens: int, choices: int, width: int, dropped: bool) -> Twins:
    """Rows written to places in three shares, and summed over the same places in another order."""
    places = torch.randperm(tokens * choices).view(tokens, choices).to(place.device)
    if dropped:
        places[::2, 0] = -1
    others = places.flatten()[torch.randperm(places.numel(), device=place.device)].view(places.shape)
    rows = -(-tokens * choices // 3)

    def shares(x: Tensor) -> list[Tensor]:
        return [x.new_zeros(rows, width) for _ in range(3)]

    def by_kernels(x: Tensor, written: Tensor, summed: Tensor) -> Tensor:
        held = shares(x)
        addresses = torch.tensor([share.data_ptr() for share in held], device=x.device)
        kernels.write_rows(x, written, addresses, rows)
        sums: Tensor = kernels.sum_rows(summed, addresses, held[0])
        return sums

    def plainly(x: Tensor, written: Tensor, summed: Tensor) -> Tensor:
        held = shares(x)
        plain_write_rows(x, written, held)
        return plain_sum_rows(summed, held)

    return Twins(
        lambda x: _ByPeers.apply(x, places, others, by_kernels),  # type: ignore[no-untyped-call]
        lambda x: _ByPeers.apply(x, places, others, plainly),  # type: ignore[no-untyped-call]
        (place.normal(tokens, width),),
    )


class _ByPeers(torch.autograd.Function):
    """Tokens that reach other tokens through the shares, by one of the twins."""

    @staticmethod
    def forward(context: Any, x: Tensor, written: Tensor, summed: Tensor, way: Function) -> Tensor:
        context.places, context.way = (written, summed), way
        return way(x, written, summed)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        written, summed = context.places
        return context.way(gradient, summed, written), None, None, None


def router(place: Place, kernels: Any, tokens: int, experts: int, width: int) -> Twins:
    """The plain twin takes what both are: the narrow numbers themselves, in any precision."""

    def of_parts(product: Function) -> Function:
        return lambda gradient, factor: product(kernels.split_gradient(gradient), factor)

    gradients = of_parts(kernels.input_gradient), of_parts(kernels.weight_gradient)
    return Twins(
        lambda x, w: _product_of(x, w, (kernels.wide_product, *gradients)),
        lambda x, w: _product_of(x, w, (_widest, routing.plain_input_gradient, routing.plain_weight_gradient)),
        (place.normal(tokens, width), place.normal(experts, width)),
    )


def _widest(x: Tensor, weight: Tensor) -> Tensor:
    return routing.plain_wide_product(x, weight, _wide(x))


def _product_of(x: Tensor, weight: Tensor, functions: tuple[Function, Function, Function]) -> Tensor:
    product: Tensor = _ProductOf.apply(x, weight, functions)  # type: ignore[no-untyped-call]
    return product


class _ProductOf(torch.autograd.Function):
    """`router_logits`, by one of the twins."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, functions: tuple[Function, Function, Function]) -> Tensor:
        context.save_for_backward(x, weight)
        context.functions = functions
        return functions[0](x, weight)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = context.saved_tensors
        _, of_input, of_weight = context.functions
        return of_input(gradient, weight), of_weight(gradient, x), None


def adamw(place: Place, kernels: Any, elements: int, step: int, scale: float) -> Twins:
    """A step from moments that were learned: master weights, the moments and the rounded weights after it."""
    numbers = kernels.AdamWStep(step, 1e-3, scale, 0.9, 0.95, 1e-8, 0.1)
    moments = place.normal(2, elements).abs() * 0.1

    def kernel(main: Tensor, gradient: Tensor) -> Tensor:
        first, second = moments[0].clone(), moments[1].clone()
        master = _master(main, place)
        kernels.update_weights(master.weight, gradient.to(place.dtype), master.storage, first, second, numbers)
        assert isinstance(master, CopiedNumbers) or torch.equal(master.weight, split_float32(master.read())[0])
        return torch.stack([master.read(), first.float(), second.float(), master.weight.float()])

    def plain(main: Tensor, gradient: Tensor) -> Tensor:
        held, (first, second) = main.clone(), moments.to(main.dtype, copy=True)
        one_by_one(
            [held],
            [gradient.to(place.dtype).to(main.dtype) * scale],
            [first],
            [second],
            [],
            [torch.tensor(step - 1.0)],
            foreach=False,
            amsgrad=False,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            lr=numbers.learning_rate,
            weight_decay=numbers.weight_decay,
            eps=numbers.epsilon,
            maximize=False,
        )
        # What is exact is rounded nowhere.
        kept = [one if one.dtype is torch.float64 else one.to(place.dtype).float() for one in (first, second, held)]
        return torch.stack([held, *kept])

    leaves = (torch.randn(elements, device=place.device), torch.randn(elements, device=place.device))
    return Twins(_stepped(kernel), _stepped(plain), leaves)


def _master(main: Tensor, place: Place) -> SplitNumbers | CopiedNumbers:
    """These numbers as master weights of weights in the place's type."""
    if place.dtype is torch.float32:
        held = main.clone()
        return CopiedNumbers(held, held)
    return SplitNumbers(*split_float32(main))


def _stepped(step: Function) -> Function:
    def function(main: Tensor, gradient: Tensor) -> Tensor:
        found: Tensor = _Stepped.apply(main, gradient, step)  # type: ignore[no-untyped-call]
        return found

    return function


class _Stepped(torch.autograd.Function):
    """A step of an optimizer, which has no gradient of its own. [4, elements]"""

    @staticmethod
    def forward(_: Any, main: Tensor, gradient: Tensor, step: Function) -> Tensor:
        return step(main, gradient)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient.sum(0), gradient.sum(0), None


# Words that exist, temperature, the type of slopes, and whether entropy has a gradient.
WordOptions = tuple[int, float, torch.dtype, bool]


def word_statistics(
    place: Place,
    kernels: Any,
    tokens: int,
    words: int,
    existing: int,
    temperature: float,
    learns_entropy: bool = False,
) -> Twins:
    """Log-probabilities, normalisers and entropies from float32 logits; their gradient in the place's precision."""
    # Words that do not exist would outweigh all others; some labels are not among these words.
    logits = torch.randn(tokens, words, device=place.device) * 3
    logits[:, existing:] = 300.0
    places = torch.randint(-words // 8, words + words // 8, (tokens,), device=place.device)

    def twin(functions: Words) -> Function:
        return lambda logits: _words_of(logits, places, (existing, temperature, place.dtype, learns_entropy), functions)

    plain = (vocabulary.plain_statistics, vocabulary.plain_slope)
    # An entropy is the small difference of large numbers.
    luck = 0.5 if learns_entropy else 0.25
    return Twins(twin((kernels.compute_statistics, kernels.compute_slope)), twin(plain), (logits,), luck)


def _words_of(logits: Tensor, places: Tensor, options: WordOptions, functions: Words) -> Tensor:
    read: Tensor = _WordsOf.apply(logits, places, options, functions)  # type: ignore[no-untyped-call]
    return read


class _WordsOf(torch.autograd.Function):
    """`token_log_probabilities` without its products, by one of the twins. [3, t]"""

    @staticmethod
    def forward(context: Any, logits: Tensor, places: Tensor, options: WordOptions, functions: Words) -> Tensor:
        existing, temperature, *_ = options
        maximum, total, weighted, label_logit = functions[0](logits.clone(), places, existing, temperature)
        normaliser = maximum + total.log()
        entropy = normaliser - weighted / total
        context.save_for_backward(logits, places, normaliser, entropy)
        context.options, context.slope = options, functions[1]
        return torch.stack([label_logit - normaliser, normaliser, entropy])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, places, normaliser, entropy = context.saved_tensors
        existing, temperature, dtype, learns_entropy = context.options
        dtype = dtype if logits.dtype is torch.float32 else logits.dtype
        gradient = gradient / temperature
        uncertainty = vocabulary.EntropyTerms(entropy, gradient[2]) if learns_entropy else None
        tokens = vocabulary.TokenTerms(places, normaliser, gradient[0], uncertainty)
        slope = context.slope(logits.clone(), tokens, existing, temperature, dtype)
        assert slope.dtype is dtype
        return slope.to(logits.dtype), None, None, None


@dataclass(frozen=True)
class Heads:
    """The shape of one attention."""

    heads: int = 8
    groups: int = 2
    dim: int = 128
    value_dim: int = 128
    window: int | None = None
    sinks: bool = False


def attended(place: Place, kernel: Function, documents: Documents, heads: Heads) -> Twins:
    """Given keys and values of the whole row."""
    sinks = (place.normal(heads.heads),) if heads.sinks else ()
    options: dict[str, Any] = {"scale": heads.dim**-0.5, "window": heads.window}
    row = documents.row_tokens
    return Twins(
        lambda q, k, v, sinks=None: kernel(q, k, v, documents, sinks=sinks, **options),
        lambda q, k, v, sinks=None: attention.plain_attention(q, k, v, documents, sinks=sinks, **options),
        (
            place.normal(documents.local_tokens, heads.heads, heads.dim),
            place.normal(row, heads.groups, heads.dim),
            place.normal(row, heads.groups, heads.value_dim),
            *sinks,
        ),
    )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


BUILDERS: dict[str, tuple[str, Callable[..., Twins]]] = {
    "swiglu": ("activation", swiglu),
    "clamped swiglu": ("activation", clamped_swiglu),
    "norm": ("norm", rms_norm),
    "rotary": ("rotary", rotated),
    "row sums": ("permutation", row_sums),
    "peer rows": ("peer_rows", peer_rows),
    "router": ("routing", router),
    "words": ("vocabulary", word_statistics),
    "adamw": ("adamw", adamw),
}


def assert_kernel(name: str, place: Place, *arguments: Any, within: float | None = None) -> None:
    """The kernel of this name agrees with its twin, within the place's bound unless another is given, or exactly."""
    torch.manual_seed(1)
    if name in CHECKS:
        module, check = CHECKS[name]
        check(place.device, import_module(f"moejob_trainer.layers.kernels.{module}"), *arguments)
        return
    module, build = BUILDERS[name]
    kernels = import_module(f"moejob_trainer.layers.kernels.{module}")
    assert_twins(build(place, kernels, *arguments), within=within or place.within)
