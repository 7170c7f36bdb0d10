"""The reference of the model check is Transformers' own code, never code that lies beside the weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import pathlib, sys, torch
from moejob_trainer.model_check.reference import ReferenceModel
ReferenceModel(None, pathlib.Path(sys.argv[1]), torch.float32)
"""
CODE = """
import pathlib
from transformers import PretrainedConfig
pathlib.Path(__file__).with_name("ran").touch()
class ForeignConfig(PretrainedConfig):
    model_type = "foreign"
"""


@pytest.mark.slow
def test_code_beside_the_weights_is_not_run_even_if_the_terminal_agrees(tmp_path: Path) -> None:
    model, modules = tmp_path / "model", tmp_path / "modules"
    model.mkdir()
    config = {"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.ForeignConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "foreign.py").write_text(CODE.replace("__file__", repr(str(model / "foreign.py"))))
    done = subprocess.run(
        [sys.executable, "-c", CHECK, model],
        input="y\n" * 5,
        env={"PATH": "/usr/bin:/bin", "HF_HOME": str(modules), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Unrecognized model identifier: foreign" in done.stderr, done.stderr[-2000:]
    assert not (model / "ran").exists()
