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
from moejob_api.models.reader import model_error
from moejob_api.models.shape import ModelShape
from moejob_api.problems import Rule
from moejob_trainer.conversion.families import ROWS, TensorTable, split_parameter_name
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.model_export import Check, skip_check
from moejob_trainer.conversion.safetensors_writer import CorruptExport
from moejob_trainer.conversion.tensor_table import TensorPiece, TensorRule, pieces_of_rule
from moejob_trainer.distributed import messages
from moejob_trainer.model.adapters import AdaptedMatrix, adapter_names, adapter_parameters, find_matrix
from moejob_trainer.model.parameters import Parameter, model_parameters
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
    def unfinished_folder(self) -> Path:
        """The folder of adapters until they are complete."""
        return self.folder.with_name(f".{self.folder.name}.unfinished")


def build_adapter_table(shape: ModelShape, lora: Lora) -> TensorTable:
    """The table of a model's adapters; InvalidSpec where a family has no matrix of its own for a target."""
    base_parameters = model_parameters(shape)
    adapters_by_name = {parameter.name: parameter for parameter in adapter_parameters(base_parameters, lora)}
    adapter_pieces = []
    for weight in base_parameters:
        matrix = find_matrix(weight.name, lora)
        if matrix is not None:
            pair = tuple(adapters_by_name[name] for name in adapter_names(weight.name))
            adapter_pieces += [
                piece
                for row in _matching_rows(shape, weight)
                for piece in _adapter_pieces(shape, weight, row, matrix, pair)
            ]
    return TensorTable(shape, tuple(adapters_by_name.values()), tuple(adapter_pieces), ())


def _matching_rows(shape: ModelShape, weight: Parameter) -> Iterator[TensorRule]:
    _, suffix = split_parameter_name(weight.name, len(shape.layers))
    for row in ROWS[shape.family]:
        if row.parameter == suffix:
            yield row


def _adapter_pieces(
    shape: ModelShape, weight: Parameter, row: TensorRule, matrix: AdaptedMatrix, pair: Sequence[Parameter]
) -> Iterator[TensorPiece]:
    prefix, _ = split_parameter_name(weight.name, len(shape.layers))
    axes = re.findall(r"\([^)]*\)|\S+", row.theirs)
    if len(axes) != len(("outputs", "inputs")):
        message = f"{shape.family} keeps all experts in one tensor, which PEFT has no adapters for; leave out"
        raise model_error(Rule.LORA, f"{message} {matrix.target} in spec.training.lora.targets")
    outputs, inputs = axes
    letters, inner = row.ours.split(), inputs.strip("()").split()
    stack = [letters[axis] for axis in matrix.stack]
    a = TensorRule(pair[0].name, " ".join([*stack, "R", *inner]), row.tensor, f"R {inputs}")
    b = TensorRule(
        pair[1].name,
        " ".join([*(letter for letter in letters if letter not in inner), "R"]),
        row.tensor,
        f"{outputs} R",
    )
    module = _PREFIX + prefix + row.tensor.removesuffix(".weight")
    for tensor, parameter, name in ((a, pair[0], "lora_A"), (b, pair[1], "lora_B")):
        yield from pieces_of_rule(tensor, parameter, f"{module}.{name}.weight", shape.vocabulary)


def export_adapters(
    state: Mapping[str, Tensor],
    table: TensorTable,
    groups: ModelGroups,
    target: AdapterTarget,
    check: Check = skip_check,
) -> Path:
    """Write the adapters whose parts all ranks hold in `state`, and read them back. All ranks call it together."""
    named_tensors = hugging_face_tensors(state, table, groups)
    local_tensors = {name: tensor.contiguous().cpu() for name, tensor in named_tensors if not tensor.is_meta}
    gathered = messages.gather_bytes(save(local_tensors), groups.world)
    if gathered is not None:
        write_adapters({name: tensor for part in gathered for name, tensor in load(part).items()}, table, target)
    messages.wait_for_group(groups.world)
    check(target.unfinished_folder)
    # No rank replaces an export that another has found to differ.
    messages.wait_for_group(groups.world)
    if groups.rank == 0:
        publish_folder(Disk(), target.unfinished_folder, target.folder, lambda _: True)
    messages.wait_for_group(groups.world)
    return target.folder


def write_adapters(tensors: Mapping[str, Tensor], table: TensorTable, target: AdapterTarget) -> None:
    """Write the unfinished folder and read it back."""
    expected = {piece.tensor: piece.shape for piece in table.pieces}
    unfinished = target.unfinished_folder
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(dict(tensors), unfinished / WEIGHTS_FILE, {"format": "pt"})
    read_back = load_file(unfinished / WEIGHTS_FILE)
    if {name: tuple(tensor.shape) for name, tensor in read_back.items()} != expected:
        raise RuntimeError(
            f"{len(read_back)} tensors of adapters were written, which are not the {len(expected)} expected"
        )
    differing = [name for name, tensor in read_back.items() if not tensor.equal(tensors[name])]
    if differing:
        raise CorruptExport(f"{unfinished / WEIGHTS_FILE}: {', '.join(sorted(differing))} read back differently")
    Disk().write(unfinished / CONFIG_FILE, json.dumps(_peft_config(table, target), indent=2).encode() + b"\n")


def _peft_config(table: TensorTable, target: AdapterTarget) -> dict[str, object]:
    lora, modules = target.lora, {_module_name(piece.tensor) for piece in table.pieces}
    experts = {module for module in modules if ".experts." in module}
    fused_parameters = {_FUSED[target] for target in lora.targets if target in _FUSED} if experts else set()
    # In families with experts, PEFT takes a matrix's name for the experts' matrix, so dense layers and shared experts
    # have to be named as parameters.
    has_experts = any(".experts." in parameter.name for parameter in model_parameters(table.shape))
    as_parameters = modules - experts if has_experts else set()
    as_parameters = {module for module in as_parameters if _last_component(module) in _AS_EXPERTS}
    # Gate and up are one parameter there, so its adapter has twice the rank.
    doubled_ranks = {rf".*\.{_GATE_UP}": 2} if _FUSED[LoraTarget.EXPERT_GATE_UP] in fused_parameters else {}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": target.base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # PEFT refuses dropout beside target_parameters; dropout is no part of the trained weights.
        "lora_dropout": 0.0 if fused_parameters or as_parameters else lora.dropout,
        "target_modules": sorted({_last_component(module) for module in modules - experts - as_parameters}),
        "target_parameters": sorted(
            fused_parameters | {f"{_LAYER.sub('', module)}.weight" for module in as_parameters}
        ),
        "rank_pattern": {pattern: times * lora.rank for pattern, times in doubled_ranks.items()},
        "alpha_pattern": {pattern: times * lora.alpha for pattern, times in doubled_ranks.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def adapter_pair_names(tensor: str) -> tuple[str, str]:
    """Return the names of the two adapter matrices of a published matrix."""
    module = _PREFIX + tensor.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _module_name(tensor: str) -> str:
    return tensor.removeprefix(_PREFIX).rsplit(".lora_", 1)[0]


def _last_component(module: str) -> str:
    return module.rpartition(".")[2]
