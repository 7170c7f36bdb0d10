"""Adapters in PEFT's format: a folder of adapter_config.json and adapter_model.safetensors.

Their names come from the family's own table, so that every published matrix has the adapter that PEFT would give it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from moejob_api.job.training import Lora, LoraTarget
from moejob_api.models.reader import refused
from moejob_api.models.shape import ModelShape
from moejob_api.problems import Rule
from moejob_trainer.conversion.families import ROWS, Table, located
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.model_export import Check, unchecked
from moejob_trainer.conversion.safetensors_writer import CorruptExport
from moejob_trainer.conversion.tensor_table import Piece, TensorRule, pieces
from moejob_trainer.distributed import messages
from moejob_trainer.model.adapters import Matrix, adapter_names, adapters, matrix_of
from moejob_trainer.model.parameters import Parameter, parameters
from moejob_trainer.runtime.disk import Disk, publish_folder

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_LAYER = re.compile(r"^model\.layers\.\d+\.")
_GATE_UP = "gate_up_proj"
# Transformers keeps all experts of a layer in one parameter; PEFT joins the adapters of single experts as it reads.
_FUSED = {LoraTarget.EXPERT_GATE_UP: f"experts.{_GATE_UP}", LoraTarget.EXPERT_DOWN: "experts.down_proj"}
_AS_EXPERTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """Destination of exported adapters, and the facts that PEFT's config needs."""

    folder: Path
    base_model: str
    lora: Lora

    @property
    def unfinished(self) -> Path:
        """The folder of adapters until they are complete."""
        return self.folder.with_name(f".{self.folder.name}.unfinished")


def adapter_table(shape: ModelShape, lora: Lora) -> Table:
    """The table of a model's adapters; InvalidSpec where a family has no matrix of its own for a target."""
    whole = parameters(shape)
    declared = {parameter.name: parameter for parameter in adapters(whole, lora)}
    found = []
    for weight in whole:
        matrix = matrix_of(weight.name, lora)
        if matrix is not None:
            pair = tuple(declared[name] for name in adapter_names(weight.name))
            found += [piece for row in _rows(shape, weight) for piece in _pieces(shape, weight, row, matrix, pair)]
    return Table(shape, tuple(declared.values()), tuple(found), ())


def _rows(shape: ModelShape, weight: Parameter) -> Iterator[TensorRule]:
    _, suffix = located(weight.name, len(shape.layers))
    for row in ROWS[shape.family]:
        if row.parameter == suffix:
            yield row


def _pieces(
    shape: ModelShape, weight: Parameter, row: TensorRule, matrix: Matrix, pair: Sequence[Parameter]
) -> Iterator[Piece]:
    prefix, _ = located(weight.name, len(shape.layers))
    axes = re.findall(r"\([^)]*\)|\S+", row.theirs)
    if len(axes) != len(("outputs", "inputs")):
        message = f"{shape.family} keeps all experts in one tensor, which PEFT has no adapters for; leave out"
        raise refused(Rule.LORA, f"{message} {matrix.target} in spec.training.lora.targets")
    outputs, inputs = axes
    letters, inner = row.ours.split(), inputs.strip("()").split()
    stack = [letters[axis] for axis in matrix.stack]
    a = TensorRule(pair[0].name, " ".join([*stack, "R", *inner]), row.tensor, f"R {inputs}")
    b = TensorRule(
        pair[1].name, " ".join([*(one for one in letters if one not in inner), "R"]), row.tensor, f"{outputs} R"
    )
    module = _PREFIX + prefix + row.tensor.removesuffix(".weight")
    for one, parameter, name in ((a, pair[0], "lora_A"), (b, pair[1], "lora_B")):
        yield from pieces(one, parameter, f"{module}.{name}.weight", shape.vocabulary)


def export_adapters(
    state: Mapping[str, Tensor], table: Table, groups: ModelGroups, target: AdapterTarget, check: Check = unchecked
) -> Path:
    """Write the adapters whose parts all ranks hold in `state`, and read them back. All ranks call it together."""
    named = hugging_face_tensors(state, table, groups)
    mine = {name: tensor.contiguous().cpu() for name, tensor in named if not tensor.is_meta}
    everyones = messages.gather_bytes(save(mine), groups.world)
    if everyones is not None:
        write_adapters({name: tensor for part in everyones for name, tensor in load(part).items()}, table, target)
    messages.barrier(groups.world)
    check(target.unfinished)
    # No rank replaces an export that another has found to differ.
    messages.barrier(groups.world)
    if groups.rank == 0:
        publish_folder(Disk(), target.unfinished, target.folder, lambda _: True)
    messages.barrier(groups.world)
    return target.folder


def write_adapters(tensors: Mapping[str, Tensor], table: Table, target: AdapterTarget) -> None:
    """Write the unfinished folder and read it back."""
    expected = {piece.tensor: piece.shape for piece in table.pieces}
    unfinished = target.unfinished
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(dict(tensors), unfinished / WEIGHTS_FILE, {"format": "pt"})
    read = load_file(unfinished / WEIGHTS_FILE)
    if {name: tuple(tensor.shape) for name, tensor in read.items()} != expected:
        raise RuntimeError(f"{len(read)} tensors of adapters were written, which are not the {len(expected)} expected")
    wrong = [name for name, tensor in read.items() if not tensor.equal(tensors[name])]
    if wrong:
        raise CorruptExport(f"{unfinished / WEIGHTS_FILE}: {', '.join(sorted(wrong))} read back differently")
    Disk().write(unfinished / CONFIG_FILE, json.dumps(_config(table, target), indent=2).encode() + b"\n")


def _config(table: Table, target: AdapterTarget) -> dict[str, object]:
    lora, modules = target.lora, {_module(piece.tensor) for piece in table.pieces}
    experts = {one for one in modules if ".experts." in one}
    fused = {_FUSED[one] for one in lora.targets if one in _FUSED} if experts else set()
    # In families with experts, PEFT takes a matrix's name for the experts' matrix, so dense layers and shared experts
    # have to be named as parameters.
    alone = modules - experts if _has_experts(table) else set()
    alone = {one for one in alone if _last(one) in _AS_EXPERTS}
    # Gate and up are one parameter there, so its adapter has twice the rank.
    of_twice = {rf".*\.{_GATE_UP}": 2} if _FUSED[LoraTarget.EXPERT_GATE_UP] in fused else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": target.base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # PEFT refuses dropout beside target_parameters; dropout is no part of the trained weights.
        "lora_dropout": 0.0 if fused or alone else lora.dropout,
        "target_modules": sorted({_last(one) for one in modules - experts - alone}),
        "target_parameters": sorted(fused | {f"{_LAYER.sub('', one)}.weight" for one in alone}),
        "rank_pattern": {pattern: times * lora.rank for pattern, times in of_twice.items()},
        "alpha_pattern": {pattern: times * lora.alpha for pattern, times in of_twice.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _has_experts(table: Table) -> bool:
    return any(".experts." in parameter.name for parameter in parameters(table.shape))


def names_of_pair(tensor: str) -> tuple[str, str]:
    """Return the names of the two adapter matrices of a published matrix."""
    module = _PREFIX + tensor.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _module(tensor: str) -> str:
    return tensor.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


def _last(module: str) -> str:
    return module.rpartition(".")[2]
