"""The model that is being trained answers as Transformers does greedily with the same weights, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from builders import merge_sections
from moejob_api.layout.sizes import derive_layout as layout_of
from moejob_api.models.shape import Family
from moejob_trainer.data.packing import batch_plan
from moejob_trainer.data.stream import BatchShare
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.objectives.answering import AnswerBounds, generate_answers
from trainer.parity.cells import LAYOUTS, Cell, make_loss, micro_batches, start_engine
from trainer.parity.lora import LORA, merge_into
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

MOST = 9
# More than ranks, and none as long as another.
LENGTHS = (3, 11, 1, 7, 19, 5)
SHARES: dict[str, dict[str, Any]] = {
    "FSDP over DP2": {"parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}},
    "FSDP over TP2.CP2": {"parallelism": {"tensor": 2, "context": 2}, "memory": {"sharding": "FSDP"}},
    "ZeRO-2 over EP2": {"parallelism": {"expert": 2}, "memory": {"sharding": "ZeRO2"}},
    "one document at a time": {"parallelism": {"tensor": 2, "data": 2}, "data": {"packing": False}},
    "tokens gathered": {"parallelism": {"expert": 2}, "moe": {"balancing": "None", "dispatcher": "AllGather"}},
}
ALL: dict[str, dict[str, Any]] = {
    "one rank": {},
    **{name: {"parallelism": sizes} for name, sizes in LAYOUTS.items()},
    **SHARES,
}


def prompts() -> list[list[int]]:
    """Random words of the small vocabulary."""
    random = np.random.default_rng(11)
    return [random.integers(3, 38, length).tolist() for length in LENGTHS]


def make_published_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of the reference, as Transformers loads it; with adapters where the folder has them."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder / "first", dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if (folder / "adapters").exists():
        merge_into(model, load_file(folder / "adapters" / "model.safetensors"))
    model.float()
    return model


def generated(folder: Path, stop: int | None = None) -> list[list[int]]:
    """The answers that Transformers generates greedily, one prompt at a time."""
    model: Any = make_published_model(folder)
    found = []
    for prompt in prompts():
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=MOST,
            eos_token_id=stop,
            pad_token_id=0,
        )
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def answered(cell: Cell, folder: Path, stop: int, trains: bool = False) -> list[list[int]]:
    """The answers of the cell's engine; one rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        if trains:
            engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
        plan = batch_plan(engine.spec, layout_of(engine.spec.parallelism, 8), pad_token=0)
        return generate_answers(
            engine, prompts(), AnswerBounds({stop}, MOST), BatchShare(plan, engine.groups.data.rank)
        )
    finally:
        stop_groups()


@cache
def expected(folder: Path) -> tuple[int, list[list[int]]]:
    """A token that ends some answers early, and what Transformers answers with it."""
    endless = generated(folder)
    stop = endless[1][3]
    found = generated(folder, stop)
    assert len({token for answer in found for token in answer}) > 3
    assert len({len(answer) for answer in found}) > 1
    return stop, found


def _holds(worlds: Worlds, reference: Reference, cell: Cell) -> None:
    folder, _ = reference(cell.family)
    stop, told = expected(folder)
    # Every rank knows every answer.
    assert worlds.run(cell.ranks(), answered, cell, folder, stop) == [told] * cell.ranks()


# Each way of dividing tokens, layers or experts, and a mix of most.
ALWAYS = (
    *("one rank", "TP2", "PP2", "PP2.VPP2", "EP2", "CP2", "DP2", "ETP2 folded", "TP2.PP2.EP2"),
    *("FSDP over DP2", "ZeRO-2 over EP2", "one document at a time", "tokens gathered"),
)


@pytest.mark.parametrize("layout", make_rows(ALL, ALWAYS))
def test_every_layout_answers_as_transformers_does(worlds: Worlds, reference: Reference, layout: str) -> None:
    _holds(worlds, reference, Cell(Family.QWEN3_MOE, ALL[layout]))


@pytest.mark.parametrize(
    "family",
    make_rows([Family.DEEPSEEK_V3, Family.GPT_OSS, Family.QWEN2, Family.MIXTRAL], [Family.DEEPSEEK_V3]),
)
def test_every_kind_of_model_answers_as_transformers_does(worlds: Worlds, reference: Reference, family: Family) -> None:
    _holds(worlds, reference, Cell(family, {"parallelism": {"tensor": 2, "context": 2}}))


@pytest.mark.parametrize("layout", ["one rank", "TP2", "FSDP over DP2"])
def test_adapters_answer_as_transformers_does_with_them_merged(
    worlds: Worlds, lora_reference: Reference, layout: str
) -> None:
    adapted = merge_sections(ALL[layout], {"training": {"lora": LORA}})
    _holds(worlds, lora_reference, Cell(Family.QWEN3_MOE, adapted))


def shortfalls(folder: Path, answers_given: list[list[int]]) -> list[float]:
    """Return how far each token of some answers is below the likeliest one, in parts of the largest logit."""
    model, found = make_published_model(folder, torch.bfloat16), []
    for prompt, answer in zip(prompts(), answers_given, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1]
        below = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found += (below / logits.abs().amax()).tolist()
    return found


@pytest.mark.parametrize("layout", ["one rank", "TP2", "FSDP over DP2"])
def test_answers_in_bfloat16_are_the_likeliest_but_for_rounding(
    worlds: Worlds, reference: Reference, layout: str
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    cell = Cell(Family.QWEN3_MOE, merge_sections(ALL[layout], {"model": {"dtype": "bfloat16"}}))
    (told, *others) = worlds.run(cell.ranks(), answered, cell, folder, -1)
    assert all(other == told for other in others)
    assert [len(answer) for answer in told] == [MOST] * len(LENGTHS)
    assert max(shortfalls(folder, told)) < 0.05
    # Answers of other prompts would be seen.
    assert max(shortfalls(folder, told[::-1])) > 0.5


def test_answers_are_those_of_the_weights_as_they_are_now(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    stop, told = expected(folder)
    sections: Mapping[str, Any] = {"training": {"optimizer": {"learningRate": 0.5}}}
    one, two = (
        worlds.run(cell.ranks(), answered, cell, folder, stop, True)
        for cell in (
            Cell(Family.QWEN3_MOE, sections),
            Cell(Family.QWEN3_MOE, merge_sections(sections, SHARES["FSDP over DP2"])),
        )
    )
    assert one[0] == two[0] == two[1]
    assert one[0] != told
