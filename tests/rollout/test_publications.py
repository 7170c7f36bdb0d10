"""Reports of a real engine on publications: a tensor that was left out is named, and a right publication lacks none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import Engine
from moejob_api.contract.pods import HttpPath
from moejob_api.contract.weight_checksums import PAGE_BYTES, page_checksums
from moejob_rollout.transfer.broadcast import BroadcastUpdate
from moejob_rollout.transfer.buckets import bucket_bytes, changed_tensors
from moejob_rollout.transfer.checksums import tensor_checksums
from rollout.references import make_model, save_published, without

Start = Callable[..., Engine]
TIED = "model.embed_tokens.weight"
WHOLE: dict[str, list[str]] = {"missing": [], "repeated": [], "changed": []}
# A dense model with biases, tied and untied mixtures, one with shared experts, and latent attention.
FAMILIES = ["qwen2", "mixtral", "qwen3_moe", "glm4_moe", "deepseek_v3"]


def reported(engine: Engine, *paths: Path, **more: Any) -> Any:
    """Return the report of an engine on these files; the engine then forgets the update."""
    engine.post_or_fail("/pause", mode="keep")
    engine.post_or_fail("/start_weight_update")
    engine.post_or_fail("/update_weights", {"update_info": {"paths": [str(path) for path in paths]} | more})
    report = engine.post_or_fail(HttpPath.PUBLICATION)
    engine.post_or_fail("/finish_weight_update", {"weight_version": "unfinished"})
    return report


@pytest.fixture(scope="module")
def tied(start: Start) -> Engine:
    """An engine of a mixture whose output layer is the embedding."""
    return start("mixtral").await_ready()


def test_a_tied_mixture_is_whole_and_each_tensor_that_was_left_out_is_named(tied: Engine, tmp_path: Path) -> None:
    reference = make_model("mixtral", 11)
    assert reported(tied, save_published(reference, tmp_path / "whole")) == WHOLE
    for tensor in (
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.layers.0.block_sparse_moe.experts.0.w3.weight",
        "model.layers.1.block_sparse_moe.gate.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.norm.weight",
        TIED,
    ):
        path = without(save_published(reference, tmp_path / "part"), tensor)
        assert reported(tied, path) == {"missing": [tensor], "repeated": [], "changed": []}
    # What broke off is no part of the next one.
    assert reported(tied, save_published(reference, tmp_path / "again")) == WHOLE


def test_a_tensor_with_other_bytes_than_were_sent_is_named(tied: Engine, tmp_path: Path) -> None:
    path = save_published(make_model("mixtral", 11), tmp_path / "whole")
    sums = {name: tensor_checksums(value) for name, value in load_file(path).items()}
    assert reported(tied, path, checksums=[sums]) == WHOLE
    sums["model.norm.weight"][0] ^= 1
    assert reported(tied, path, checksums=[sums]) == WHOLE | {"changed": ["model.norm.weight"]}


# Sizes that no word divides, in parts of two ranks; the second begins between two words.
BUCKET = BroadcastUpdate(
    names=["a", "b", "c", "d"],
    dtype_names=["bfloat16", "float32", "uint8", "bfloat16"],
    shapes=[[700_001], [5], [7], [600_000]],
    part_bytes=[1_400_022, 1_200_007],
)


@pytest.mark.parametrize(
    ("place", "names"),
    [
        pytest.param(3, ["a"], id="in the first page"),
        pytest.param(1_400_010, ["a", "b"], id="in a page of two tensors"),
        pytest.param(1_400_025, ["c", "d"], id="in the second part"),
        pytest.param(2_600_028, ["d"], id="the last byte"),
    ],
)
@pytest.mark.parametrize("bit", [0, 7])
def test_one_bit_of_a_bucket_is_seen_and_the_tensors_of_its_page_are_named(
    place: int, bit: int, names: list[str]
) -> None:
    bucket = torch.randint(0, 256, (bucket_bytes(BUCKET),), dtype=torch.uint8)
    sums = [tensor_checksums(part) for part in bucket.split(BUCKET.part_bytes)]
    update = replace(BUCKET, checksums=sums)
    assert changed_tensors(bucket, update) == []
    bucket[place] ^= 1 << bit
    assert changed_tensors(bucket, update) == names


@pytest.mark.parametrize("start", [0, 3], ids=["at a word", "between two words"])
@pytest.mark.parametrize("size", [0, 1, 8, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 5])
def test_tensors_and_arrays_have_equal_checksums(start: int, size: int) -> None:
    data = torch.randint(0, 256, (size + start,), dtype=torch.uint8)[start:]
    sums = page_checksums(data, torch)
    assert sums == page_checksums(data.numpy(), np)
    assert len(sums) == -(-size // PAGE_BYTES)


def test_words_that_changed_places_are_seen() -> None:
    words = torch.arange(300_000, dtype=torch.int64)
    sums = tensor_checksums(words)
    for first, second in ((0, 1), (5, 1029), (7, 131_079)):
        moved = words.clone()
        moved[[first, second]] = words[[second, first]]
        assert tensor_checksums(moved) != sums


@pytest.mark.thorough
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_missed_by_its_name_and_a_whole_model_is_accepted(
    family: str, tensor: int, start: Start, tmp_path: Path
) -> None:
    engine = start(family, tensor=tensor).await_ready()
    path = save_published(make_model(family, 11), tmp_path / "whole")
    tensors = load_file(path)
    assert reported(engine, path) == WHOLE
    unseen = {}
    for name in tensors:
        left = {other: value for other, value in tensors.items() if other != name}
        save_file(left, tmp_path / "part.safetensors", {"format": "pt"})
        report = reported(engine, tmp_path / "part.safetensors")
        if report != {"missing": [name], "repeated": [], "changed": []}:
            unseen[name] = report
    assert unseen == {}
    assert reported(engine, path) == WHOLE
    engine.kill()


@pytest.mark.thorough
def test_a_tensor_that_comes_twice_fills_the_place_of_none(start: Start, tmp_path: Path) -> None:
    engine, name = start("qwen2").await_ready(), "model.layers.1.self_attn.k_proj.weight"
    path = save_published(make_model("qwen2", 11), tmp_path / "whole")
    again = tmp_path / "again.safetensors"
    # As large as v_proj, without which the count is complete.
    save_file({name: load_file(path)[name]}, again, {"format": "pt"})
    part = without(path, "model.layers.1.self_attn.v_proj.weight")
    assert reported(engine, again, part)["repeated"] == [name]
    engine.kill()
