"""The load of experts is recorded as it was counted, in a file that stays small."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import numpy as np

from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.tracking.expert_log import append_expert_counts, expert_line, is_recorded_step, mend_expert_log
from moejob_trainer.training import ExpertCounts


def test_steps_that_are_recorded_get_rarer_with_every_doubling() -> None:
    recorded = [step for step in range(1, 100_001) if is_recorded_step(step)]
    assert recorded[:127] == [*range(1, 128)]
    assert sum(1_024 <= step < 2_048 for step in recorded) == 64
    assert len(recorded) < 800


def test_a_line_has_the_choices_of_every_expert(tmp_path: Path) -> None:
    counts = ExpertCounts((1, 2), np.array([[3, 0, 5], [2, 2, 4]]), per_token=2)
    append_expert_counts(tmp_path, 7, FenceToken(2, 1), counts)
    with (tmp_path / "experts.jsonl").open("a") as file:
        file.write('{"step": 8, "ex')
    mend_expert_log(tmp_path)
    (text,) = (tmp_path / "experts.jsonl").read_text().splitlines()
    line = json.loads(text)
    choices = np.frombuffer(zlib.decompress(base64.b64decode(line.pop("choices"))), "<u4")
    assert choices.tolist() == [3, 0, 5, 2, 2, 4]
    assert line == {"step": 7, "attempt": 2, "restart": 1, "layers": [1, 2], "experts": 3, "expertsPerToken": 2}


def test_a_line_has_the_disagreement_of_engine_and_trainer_where_choices_are_replayed() -> None:
    counts = ExpertCounts((1, 2), np.array([[3, 0, 5], [2, 2, 4]]), 2, np.array([0.25, 1 / 3]))
    assert json.loads(expert_line(7, FenceToken(2, 1), counts))["disagreement"] == [0.25, 0.333333]
