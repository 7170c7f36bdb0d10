"""Bytes that a layer keeps for its backward pass, measured, against those that planning counts.

On a CPU norms and activations keep more than their kernels do; what a choice of recomputation saves is the same.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from builders import spec
from model_configs import config
from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import Family
from moejob_api.planner.memory.activations import mtp_module_bytes
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES, kept_by_layer
from moejob_api.planner.memory.microbatch_share import activation_settings, microbatch_share
from moejob_trainer.distributed.groups import Group, Groups
from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.routing import router_logits
from moejob_trainer.model.architecture import read_architecture
from moejob_trainer.model.layer import TransformerLayer
from moejob_trainer.model.multi_token_prediction import MTPModule
from moejob_trainer.model.offload import OffloadedLayer, OffloadedPass
from moejob_trainer.model.packed_batch import LocalTokens, PackedBatch, make_packed_batch

TOKENS = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, tuple[Family, int]] = {
    "experts": (Family.QWEN3_MOE, 0),
    "experts beside a shared one": (Family.DEEPSEEK_V3, -1),
    "linear attention": (Family.QWEN3_NEXT, 0),
    "a dense layer": (Family.LLAMA, 0),
    "a dense layer with compressed keys": (Family.DEEPSEEK_V3, 0),
}
ALONE = Groups()
# Exactly what planning says: nothing that only a CPU keeps goes with it.
EXACT = ("Norms", "ExpertInput", "ExpertActivation", "Norms ExpertInput ExpertActivation")
AT_LEAST = (
    "CoreAttention",
    "LatentUpProjection",
    "MLP",
    "SharedExperts",
    "Norms SharedExperts",
    "Experts",
    "Norms Experts",
    "Norms MLP",
    "Norms ExpertInput ExpertActivation MLP",
)


class Made(TorchDispatchMode):
    """Remembers all memory that is taken, without holding it; not that of `before`."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken: dict[int, Any] = {}
        self._before = {_address(tensor) for tensor in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and _address(tensor) not in self._before:
                storage: Any = tensor.untyped_storage()
                # One weak reference each: its address is not given to another storage before.
                self._taken.setdefault(storage._cdata, storage._weak_ref())  # noqa: SLF001 torch has no other word
        return result

    def bytes(self) -> int:
        """Of what is still held."""
        gc.collect()
        storages: Any = torch.UntypedStorage
        alive = [storages._new_with_weak_ptr(pointer) for pointer in self._taken.values()]  # noqa: SLF001
        return sum(int(storage.nbytes()) for storage in alive if storage is not None)


def _address(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    address: int = storage._cdata  # noqa: SLF001 torch has no other word
    return address


def kept_bytes(compute: Callable[[], Tensor], before: Iterable[Tensor] = ()) -> int:
    """Return the bytes that the backward pass of a result holds, without the result and those `before`."""
    made = Made(before)
    with made:
        result = compute()
    return made.bytes() - result.untyped_storage().nbytes()


def _job(modules: str, **parallelism: int) -> Spec:
    recompute = {"granularity": "Selective", "modules": modules.split()} if modules else {"granularity": "None"}
    # In any other type the CPU keeps wide copies of what its kernels keep as it is.
    training = {"recompute": recompute}
    return spec(
        model={"dtype": "float32"},
        training=training,
        moe={"balancing": "None"},
        parallelism={"expert": 1} | parallelism,
    )


def _layer(name: str, job: Spec, groups: Groups = ALONE) -> tuple[TransformerLayer, PackedBatch, int]:
    family, number = FAMILIES[name]
    model = read_architecture(config(family, **SIZES))
    shape = model.shape.layers[number]
    torch.manual_seed(3)
    layer = TransformerLayer(shape, model, job, groups)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    documents = Documents.from_lengths([TOKENS])
    own = documents.segment_ids()[: TOKENS // groups.tensor.size]
    packed = make_packed_batch(documents, model.rotary, None, LocalTokens(torch.ones(len(own), dtype=torch.bool), own))
    of_gpu = microbatch_share(job, model.shape, derive_layout(job.parallelism, 8), TOKENS)
    return layer, packed, kept_by_layer(shape, of_gpu, activation_settings(job)).total


def _measured_and_planned(name: str, modules: str) -> tuple[int, int]:
    layer, packed, planned = _layer(name, _job(modules))
    x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    return kept_bytes(lambda: layer(x, packed)), planned


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("modules", [*EXACT, *AT_LEAST])
def test_a_layer_saves_what_planning_says(name: str, modules: str) -> None:
    (whole, whole_planned), (some, some_planned) = (_measured_and_planned(name, which) for which in ("", modules))
    saved, planned = whole - some, whole_planned - some_planned
    assert saved == planned if modules in EXACT else saved >= planned


@pytest.mark.parametrize("modules", [*EXACT, *AT_LEAST])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_made_again_is_what_was_forgotten_to_the_bit(name: str, modules: str) -> None:
    gradients = []
    for which in ("", modules):
        layer, packed, _ = _layer(name, _job(which))
        x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
        layer(x, packed).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    for found, expected in zip(*gradients, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert torch.equal(found, expected)
            assert expected.any()


@pytest.mark.parametrize("modules", EXACT)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_made_again_is_gone_behind_the_backward_pass_of_its_layer(name: str, modules: str) -> None:
    held = []
    for which in ("", modules):
        layer, packed, _ = _layer(name, _job(which))
        x = torch.randn(TOKENS, 32).requires_grad_()
        with Made([*layer.parameters(), packed.cosine, packed.sine, x]) as made:
            result = layer(x, packed)
            result.sum().backward()
        # The graph is still there, as that of all layers is until the first one is done.
        assert result.grad_fn is not None
        held.append(made.bytes())
    assert held[1] == held[0]


@pytest.fixture
def two_ranks() -> Iterator[Groups]:
    """The groups of the first of two tensor ranks; what the other one sends is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Groups(tensor=Group(0, 2, dist.group.WORLD), expert_tensor=Group(0, 2, dist.group.WORLD))
    dist.destroy_process_group()


def _measured_and_planned_on(groups: Groups, name: str, modules: str) -> tuple[int, int]:
    layer, packed, planned = _layer(name, _job(modules, tensor=groups.tensor.size), groups)
    x = torch.randn(TOKENS // groups.tensor.size, 32).requires_grad_()
    return kept_bytes(lambda: layer(x, packed), [*layer.parameters(), packed.cosine, packed.sine]), planned


@pytest.mark.parametrize("modules", ["", "Norms", "MLP", "LatentUpProjection", "CoreAttention"])
@pytest.mark.parametrize("name", ["a dense layer", "a dense layer with compressed keys"])
def test_tensor_ranks_keep_their_share_of_the_row_alone(two_ranks: Groups, name: str, modules: str) -> None:
    alone, alone_planned = _measured_and_planned_on(ALONE, name, modules)
    shared, shared_planned = _measured_and_planned_on(two_ranks, name, modules)
    assert 2 * shared == alone
    assert 2 * shared_planned == alone_planned


def _offloaded_bytes(layer: TransformerLayer, packed: PackedBatch, x: Tensor) -> int:
    """Copies in host memory, and whatever is left where it was computed."""

    def offloaded() -> Tensor:
        with OffloadedPass([packed.cosine, packed.sine]) as offloaded, offloaded.offload_module(layer):
            result: Tensor = layer(x, packed)
            return result

    return kept_bytes(offloaded, [x, *layer.parameters(), packed.cosine, packed.sine])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_kept_is_offloaded_once_and_weights_stay(name: str) -> None:
    layer, packed, _ = _layer(name, _job(""))
    x = torch.randn(TOKENS, 32).requires_grad_()
    whole = kept_bytes(lambda: layer(x, packed), [*layer.parameters(), packed.cosine, packed.sine])
    offloaded = _offloaded_bytes(layer, packed, x)
    # Where only a part of what was computed is needed, only that is copied; where two are of different shape, both.
    assert offloaded == pytest.approx(whole + x.nbytes, rel=0.06)
    if name == "a dense layer":
        assert offloaded == whole + x.nbytes


@pytest.mark.parametrize("modules", EXACT)
def test_what_is_made_again_is_not_offloaded_and_is_made_from_what_is(modules: str) -> None:
    layer, packed, _ = _layer("experts", _job(modules))
    staying = [*layer.parameters(), packed.cosine, packed.sine]
    x = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    kept = kept_bytes(lambda: layer(x, packed), staying)
    assert _offloaded_bytes(layer, packed, x) == pytest.approx(kept + x.nbytes, rel=0.07)
    plain = torch.autograd.grad(layer(x, packed).square().sum(), [x, *layer.parameters()])
    with OffloadedPass([packed.cosine, packed.sine]) as offloaded, offloaded.offload_module(layer):
        result = layer(x, packed)
    found = torch.autograd.grad(result.square().sum(), [x, *layer.parameters()])
    # What comes back lies in rows, which another kernel multiplies.
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-3) for pair in zip(found, plain, strict=True))


def test_two_layers_at_most_are_fetched_at_a_time_and_none_is_left() -> None:
    layers = [nn.Linear(8, 8) for _ in range(5)]
    fetched, x = list[list[int]](), torch.randn(4, 8, requires_grad=True)
    with OffloadedPass([]) as offloaded:
        numbers = weakref.WeakKeyDictionary[OffloadedLayer, int]()
        for number, module in enumerate(layers):
            with offloaded.offload_module(module):
                within = module(x)
                x = within.tanh()
            assert offloaded.last is not None
            numbers[offloaded.last] = number
            for passed in (x, within):
                passed.register_hook(
                    lambda _: fetched.append(sorted(n for layer, n in numbers.items() if layer.is_fetched))
                )
    del offloaded
    x.sum().backward()
    assert fetched == [[], [3, 4], [3], [2, 3], [2], [1, 2], [1], [0, 1], [0], [0]]
    assert not numbers, "layers outlive the pass, and their memory with them"


@pytest.mark.parametrize("name", ["a dense layer", "a dense layer with compressed keys"])
@pytest.mark.usefixtures("two_ranks")
def test_weights_that_are_gathered_for_a_layer_are_not_offloaded(name: str) -> None:
    layer, packed, _ = _layer(name, _job(""))
    x = torch.randn(TOKENS, 32).requires_grad_()
    offloaded = _offloaded_bytes(layer, packed, x)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    assert _offloaded_bytes(layer, packed, x) == offloaded


@pytest.mark.parametrize("family", [Family.DEEPSEEK_V3, Family.GLM4_MOE])
def test_a_module_for_a_further_token_keeps_beside_its_layer_what_planning_says(family: Family) -> None:
    job, model = _job(""), read_architecture(config(family, **SIZES))
    module = MTPModule(model.shape.mtp_layers[0], model, job, ALONE)
    _, packed, _ = _layer("a dense layer", job)
    packed = make_packed_batch(packed.documents, model.rotary, None, LocalTokens(packed.is_real, packed.segments))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    before, x = [*module.parameters(), packed.cosine, packed.sine], torch.randn(TOKENS, 32).requires_grad_()
    # The embedded token, and the layer's input, come from somewhere.
    whole = kept_bytes(lambda: module(x, x * 2, packed), before)
    layer = kept_bytes(lambda: module.layer(x * 2, packed), before)
    # Where a kernel keeps a number of each token beside its input, torch's operations keep the quotient too.
    wide = kept_bytes(lambda: module.final_norm(x), before) - TOKENS * FLOAT32_BYTES
    of_gpu = microbatch_share(job, model.shape, derive_layout(job.parallelism, 8), TOKENS)
    assert whole + x.nbytes - layer - 3 * wide == mtp_module_bytes(of_gpu)


def test_a_router_keeps_no_wide_copy_of_the_tokens() -> None:
    x = torch.randn(TOKENS, 32).bfloat16().requires_grad_()
    weight = torch.randn(8, 32).bfloat16().requires_grad_()
    assert kept_bytes(lambda: router_logits(x, weight, dtype=torch.float32)) == 0
