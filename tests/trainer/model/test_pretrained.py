"""The config of a model on a volume that may not answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from moejob_api.job.model import Model
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.model.pretrained import read_pretrained

MODEL = Model(source="/model")


def test_a_config_that_is_missing_or_no_json_is_bad_configuration(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match=r"config\.json cannot be read: it is not there"):
        read_pretrained(tmp_path, MODEL)
    for text in ("{", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(BadConfiguration, match=r"config\.json cannot be read: .*spec\.model\.source needs it"):
            read_pretrained(tmp_path, MODEL)


def test_a_volume_that_does_not_answer_is_asked_again_by_the_next_start(tmp_path: Path) -> None:
    # Every read of it fails with EIO, as on a disk that dies.
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    with pytest.raises(TransientFailure, match=r"config failed at .*Input/output error.*may answer again"):
        read_pretrained(tmp_path, MODEL)
