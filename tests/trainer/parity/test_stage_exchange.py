"""Stages know the shapes of what they send one another; that the numbers are right is tested with every pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.pipeline import forward_backward
from moejob_trainer.megatron.topology import stop_groups
from trainer.parity.cells import Cell, make_loss, micro_batches, start_engine
from trainer.parity.references import Reference
from trainer.worlds import Worlds

USED = "moejob_trainer.megatron.training_engine.forward_backward"
EVEN, UNEVEN = (8, 8, 8, 8), (9, 17, 5, 12)
PP2: dict[str, Any] = {"pipeline": 2}
VPP2: dict[str, Any] = {"pipeline": 2, "virtualPipeline": 2}


@dataclass(frozen=True)
class Exchanged:
    """Shapes that a step has sent beside hidden states, and the number of lengths that its micro batches have."""

    shapes: int
    lengths: int


@pytest.mark.parametrize(
    ("parallelism", "lengths", "asks"),
    [
        pytest.param(PP2, UNEVEN, False, id="one after the other, of many lengths"),
        pytest.param(VPP2, EVEN, False, id="interleaved, of one length"),
        pytest.param(VPP2, UNEVEN, True, id="interleaved, of many lengths"),
    ],
)
def test_shapes_travel_only_where_their_order_is_not_known(
    worlds: Worlds, reference: Reference, parallelism: dict[str, Any], lengths: tuple[int, ...], asks: bool
) -> None:
    folder, _ = reference(Family.QWEN3)
    for found in worlds.run(2, record_exchange, _cell(parallelism, lengths), folder):
        assert (found.lengths > 1) == (lengths is UNEVEN)
        assert (found.shapes > 0) == asks


def test_a_stage_that_would_send_another_shape_says_so(worlds: Worlds, reference: Reference) -> None:
    folder, _ = reference(Family.QWEN3)
    said = worlds.run(2, sent_in_another_shape, _cell(PP2, EVEN), folder)
    assert "a stage sends [32, 1, 32] to next, which expects [33, 1, 32]" in said[0]


def _cell(parallelism: dict[str, Any], lengths: tuple[int, ...]) -> Cell:
    sections = {"parallelism": parallelism, "training": {"microBatchSize": 1, "globalBatchSize": len(lengths)}}
    return Cell(Family.QWEN3, sections, lengths=lengths)


def record_exchange(cell: Cell, folder: Path) -> Exchanged:
    """One rank's part."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        batches = micro_batches(cell, engine, 0)
        whole = P2PCommunicator._communicate_shapes  # noqa: SLF001  # Megatron's name
        with patch.object(P2PCommunicator, "_communicate_shapes", autospec=True, side_effect=whole) as asked:
            engine.update(batches, make_loss(cell, engine))
    finally:
        stop_groups()
    return Exchanged(asked.call_count, len({len(batch.tokens) for batch in batches}))


def sent_in_another_shape(cell: Cell, folder: Path) -> str:
    """Return what the first stage says. The last one would wait for it."""
    use_cpu()
    engine = start_engine(cell, folder)

    def longer(*arguments: Any, shapes: list[tuple[int, int, int]], **options: Any) -> None:
        forward_backward(*arguments, shapes=[(rows + 1, one, hidden) for rows, one, hidden in shapes], **options)

    try:
        if engine.groups.pipeline.rank == 0:
            with patch(USED, longer), pytest.raises(RuntimeError) as refused:
                engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
            return str(refused.value)
    finally:
        stop_groups()
    return ""
