"""Low-rank adapters: the matrices that get one, the shapes of its two factors, and their product.

An adapter is scale * B A beside a matrix W. Where our W holds several published matrices (keys and values, gate and
up, the experts), each of them has its own adapter, so that adapters can be published the same way. B is divided like
the outputs of W and A like its inputs; of a factor that is whole, each rank computes only a part of the gradient. For
gate_up [2, f, h] and rank r: A [2, r, h], B [2, f, r].
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from moejob_api.job.training import Lora, LoraTarget
from moejob_trainer.layers.experts import grouped_linear
from moejob_trainer.model.parameters import Parameter

Between = Callable[[Tensor], Tensor]
A, B = "lora_a", "lora_b"
# The update and the micro batch that masks are sampled for: recomputation samples the same ones.
dropout_key: ContextVar[tuple[int, int]] = ContextVar("dropout_key", default=(0, 0))


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """The published matrices in a parameter: which axes count them, and how many are inputs."""

    target: LoraTarget
    stack: tuple[int, ...] = ()
    inputs: int = 1


MATRICES = {
    "attention.query.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.key_value.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE, stack=(1,)),
    "attention.query_down.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.query_up.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.key_value_down.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.key_value_up.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.output.weight": AdaptedMatrix(LoraTarget.ATTENTION_OUTPUT, inputs=2),
    "attention.state_input.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.state_rates.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.state_gate.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.state_strength.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.state_decay.weight": AdaptedMatrix(LoraTarget.QUERY_KEY_VALUE),
    "attention.state_output.weight": AdaptedMatrix(LoraTarget.ATTENTION_OUTPUT, inputs=2),
    "mlp.gate_up.weight": AdaptedMatrix(LoraTarget.GATE_UP, stack=(0,)),
    "mlp.down.weight": AdaptedMatrix(LoraTarget.DOWN),
    "moe.shared.gate_up.weight": AdaptedMatrix(LoraTarget.GATE_UP, stack=(0,)),
    "moe.shared.down.weight": AdaptedMatrix(LoraTarget.DOWN),
    "moe.experts.gate_up": AdaptedMatrix(LoraTarget.EXPERT_GATE_UP, stack=(0, 1)),
    "moe.experts.down": AdaptedMatrix(LoraTarget.EXPERT_DOWN, stack=(0,)),
}


def find_matrix(name: str, lora: Lora) -> AdaptedMatrix | None:
    """Return the kind of matrix that a parameter of a layer is, if it gets an adapter."""
    match name.split(".", 2):
        case ["layers", _, suffix] if suffix in MATRICES and MATRICES[suffix].target in lora.targets:
            return MATRICES[suffix]
        case _:
            return None


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the two matrices of an adapter."""
    owner = weight.removesuffix("weight") if weight.endswith(".weight") else f"{weight}_"
    return owner + A, owner + B


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter."""
    return name.endswith((A, B))


def adapter_parameters(parameters: Iterable[Parameter], lora: Lora) -> tuple[Parameter, ...]:
    """The adapters of a model's parameters."""
    return tuple(
        adapter
        for parameter in parameters
        if (matrix := find_matrix(parameter.name, lora)) is not None
        for adapter in _factor_parameters(parameter, matrix, lora.rank)
    )


def _factor_parameters(weight: Parameter, matrix: AdaptedMatrix, rank: int) -> Iterator[Parameter]:
    first_input = len(weight.shape) - matrix.inputs
    names = adapter_names(weight.name)
    # The rank stands before the inputs in A, and in their place in B.
    factor_axes = {A: [*matrix.stack, None, *range(first_input, len(weight.shape))], B: [*range(first_input), None]}
    for name, axes in zip(names, factor_axes.values(), strict=True):
        yield Parameter(
            name=name,
            shape=tuple(rank if axis is None else weight.shape[axis] for axis in axes),
            divided=tuple((axes.index(axis), group) for axis, group in weight.divided if axis in axes),
            may_be_whole=weight.may_be_whole,
            sections=weight.sections if name == names[1] else (),
        )


@dataclass(frozen=True, slots=True)
class DropoutMask:
    """Dropout of an adapter's inputs: `name` differs between adapters, `seed` between runs."""

    name: str
    seed: int
    rate: float

    def apply_dropout(self, x: Tensor, part: int = 0) -> Tensor:
        """Zero a part of the inputs and scale up the others, while gradients are computed."""
        if not self.rate or not torch.is_grad_enabled():
            return x
        generator = torch.Generator(x.device).manual_seed(derive_seed(self.seed, self.name, part, *dropout_key.get()))
        is_kept = torch.rand(x.shape, generator=generator, device=x.device) >= self.rate
        return x * is_kept / (1.0 - self.rate)


@dataclass(frozen=True, slots=True)
class AdapterFactor:
    """One of an adapter's two matrices, which belongs to the module that owns the adapted one.

    It is looked up again whenever it is needed: replicas that divide weights put others in its place, with fewer axes.
    """

    owner: nn.Module
    name: str
    shape: torch.Size

    @property
    def parameter(self) -> nn.Parameter:
        """As the module holds it for now."""
        matrix: nn.Parameter = getattr(self.owner, self.name)
        return matrix

    @property
    def weight(self) -> Tensor:
        """With its axes, while it computes."""
        return self.parameter.view(self.shape)


class Adapter:
    """A low-rank adapter beside one matrix."""

    def __init__(
        self, a: AdapterFactor, b: AdapterFactor, matrix: AdaptedMatrix, scale: float, mask: DropoutMask
    ) -> None:
        self.factors, self.matrix, self.scale, self.mask = (a, b), matrix, scale, mask
        self.rank = a.shape[len(matrix.stack)]

    @property
    def a(self) -> Tensor:
        """The matrix that meets the inputs. [*stack, rank, *inputs]"""
        return self.factors[0].weight

    @property
    def b(self) -> Tensor:
        """The matrix that makes the outputs. [*outputs, rank]"""
        return self.factors[1].weight

    def apply(self, x: Tensor, between: Between | None = None, *, part: int = 0) -> Tensor:
        """Return the adapter's part of the product of a matrix with x. [t, *inputs] -> [t, *outputs]

        `between` takes the narrow rows between the two matrices elsewhere; `part` differs between parts of a row.
        """
        x = self.mask.apply_dropout(x.flatten(1), part)
        count = math.prod(self.a.shape[: len(self.matrix.stack)])
        narrow = functional.linear(x, self.a.view(count * self.rank, -1))
        narrow = narrow if between is None else between(narrow)
        if not self.matrix.stack:
            return self.scale * _multiply_by_b(narrow, self.b)
        (axis,) = self.matrix.stack
        pairs = zip(narrow.split(self.rank, dim=1), self.b.unbind(axis), strict=True)
        return self.scale * torch.stack([_multiply_by_b(rows, b) for rows, b in pairs], dim=axis + 1)

    def apply_to_experts(self, rows: Tensor, bounds: Tensor) -> Tensor:
        """The same for rows sorted by expert, bounds as `grouped_linear` has them. [r, inputs] -> [r, *outputs]"""
        rows = self.mask.apply_dropout(rows)
        if len(self.matrix.stack) == 1:
            return self.scale * grouped_linear(grouped_linear(rows, self.a, bounds), self.b, bounds)
        pairs = zip(self.a.unbind(1), self.b.unbind(1), strict=True)
        return self.scale * torch.stack(
            [grouped_linear(grouped_linear(rows, a, bounds), b, bounds) for a, b in pairs], 1
        )

    def delta_weight(self, gather_whole: Callable[[Tensor], Tensor]) -> Tensor:
        """scale * B A, in the shape of the matrix; `gather_whole` puts a parameter together that replicas divide."""
        a, b = (gather_whole(factor.parameter).view(factor.shape) for factor in self.factors)
        inputs = a.shape[len(self.matrix.stack) + 1 :]
        a = a.flatten(len(self.matrix.stack) + 1)
        # Stacked axes lead in A; in B they stand where they do in the matrix.
        b = b.movedim(self.matrix.stack, tuple(range(len(self.matrix.stack))))
        outputs = b.shape[len(self.matrix.stack) : -1]
        stacked = (b.flatten(len(self.matrix.stack), -2) @ a).unflatten(-2, outputs).unflatten(-1, inputs)
        return self.scale * stacked.movedim(tuple(range(len(self.matrix.stack))), self.matrix.stack)


def _multiply_by_b(narrow: Tensor, b: Tensor) -> Tensor:
    return functional.linear(narrow, b.flatten(0, -2)).view(len(narrow), *b.shape[:-1])


def derive_seed(*parts: int | str) -> int:
    """A seed that depends on all of these and on nothing else."""
    return zlib.crc32(" ".join(map(str, parts)).encode())


def initialise_factor(parameter: Parameter, local_slices: Sequence[slice], seed: int) -> Tensor:
    """Return a rank's part of a new adapter: B is zero, and A the same whatever the layout, sampled as PEFT does."""
    shape = parameter.shape
    inputs = shape[-MATRICES[_weight_suffix(parameter.name)].inputs :]
    if parameter.name.endswith(B):
        return torch.zeros([part.stop - part.start for part in local_slices])
    # Expert by expert: a rank holds few of hundreds, and samples only those.
    if ".experts." not in parameter.name:
        return _sample_uniform(shape, derive_seed(seed, parameter.name), inputs)[tuple(local_slices)]
    first, *other_slices = local_slices
    experts = [
        _sample_uniform(shape[1:], derive_seed(seed, parameter.name, expert), inputs)[tuple(other_slices)]
        for expert in range(first.start, first.stop)
    ]
    return torch.stack(experts)


def _weight_suffix(adapter: str) -> str:
    suffix = adapter.split(".", 2)[2].removesuffix(A).removesuffix(B)
    return suffix.removesuffix("_") if suffix.endswith("_") else f"{suffix}weight"


def _sample_uniform(shape: Sequence[int], seed: int, inputs: Sequence[int]) -> Tensor:
    reach = torch.Size(inputs).numel() ** -0.5
    return (torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 2 - 1) * reach
