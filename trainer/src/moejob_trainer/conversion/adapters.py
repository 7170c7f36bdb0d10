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

from safetensors.torch import load_file, save_file
from torch import Tensor

from moejob_api.job.training import Lora
from moejob_api.models.reader import refused
from moejob_api.models.shape import ModelShape
from moejob_api.problems import Rule
from moejob_trainer.conversion.families import ROWS, Table, located
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups, collected, told
from moejob_trainer.conversion.pieces import Piece, Row, pieces
from moejob_trainer.conversion.shards import CorruptExport
from moejob_trainer.model.adapters import Matrix, adapter_names, adapters, matrix_of
from moejob_trainer.model.parameters import Parameter, parameters

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """Where adapters go, and what PEFT wants to know about them."""

    folder: Path
    base_model: str
    lora: Lora


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


def _rows(shape: ModelShape, weight: Parameter) -> Iterator[Row]:
    _, suffix = located(weight.name, len(shape.layers))
    for row in ROWS[shape.family]:
        if row.parameter == suffix:
            yield row


def _pieces(
    shape: ModelShape, weight: Parameter, row: Row, matrix: Matrix, pair: Sequence[Parameter]
) -> Iterator[Piece]:
    prefix, _ = located(weight.name, len(shape.layers))
    axes = re.findall(r"\([^)]*\)|\S+", row.theirs)
    if len(axes) != len(("outputs", "inputs")):
        message = f"{shape.family} keeps all experts in one tensor, which PEFT has no adapters for; leave out"
        raise refused(Rule.LORA, f"{message} {matrix.target} in spec.training.lora.targets")
    outputs, inputs = axes
    letters, inner = row.ours.split(), inputs.strip("()").split()
    stack = [letters[axis] for axis in matrix.stack]
    a = Row(pair[0].name, " ".join([*stack, "R", *inner]), row.tensor, f"R {inputs}")
    b = Row(pair[1].name, " ".join([*(one for one in letters if one not in inner), "R"]), row.tensor, f"{outputs} R")
    module = _PREFIX + prefix + row.tensor.removesuffix(".weight")
    for one, parameter, name in ((a, pair[0], "lora_A"), (b, pair[1], "lora_B")):
        yield from pieces(one, parameter, f"{module}.{name}.weight", shape.vocabulary)


def export_adapters(state: Mapping[str, Tensor], table: Table, groups: ModelGroups, target: AdapterTarget) -> Path:
    """Writes the adapters whose parts all ranks hold in `state`, and reads them back. All ranks call it together."""
    mine = {name: tensor.contiguous().cpu() for name, tensor in hugging_face_tensors(state, table, groups)}
    everyones = collected(mine, groups.world)
    if everyones is not None:
        _write({name: tensor for part in everyones for name, tensor in part.items()}, table, target)
    return told(target.folder if groups.rank == 0 else None, groups.world)


def _write(tensors: Mapping[str, Tensor], table: Table, target: AdapterTarget) -> None:
    expected = {piece.tensor: piece.shape for piece in table.pieces}
    unfinished = target.folder.with_name(f".{target.folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    save_file(dict(tensors), unfinished / WEIGHTS_FILE, {"format": "pt"})
    read = load_file(unfinished / WEIGHTS_FILE)
    if {name: tuple(tensor.shape) for name, tensor in read.items()} != expected:
        raise RuntimeError(f"{len(read)} tensors of adapters were written, which are not the {len(expected)} expected")
    wrong = [name for name, tensor in read.items() if not tensor.equal(tensors[name])]
    if wrong:
        raise CorruptExport(f"{unfinished / WEIGHTS_FILE}: {', '.join(sorted(wrong))} read back differently")
    (unfinished / CONFIG_FILE).write_text(json.dumps(_config(table, target), indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(target.folder, ignore_errors=True)
    unfinished.rename(target.folder)


def _config(table: Table, target: AdapterTarget) -> dict[str, object]:
    modules = {piece.tensor.removeprefix(_PREFIX).rsplit(".lora_", 1)[0].rsplit(".", 1)[1] for piece in table.pieces}
    lora = target.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": target.base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
