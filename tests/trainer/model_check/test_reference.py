"""The reference of the model check is Transformers' own code: not what lies beside the weights, nor other packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from model_configs import config as small_config
from moejob_api.models.shape import Family

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


# flash-linear-attention as Transformers sees it: kernels that take tensors of a GPU only.
KERNELS = """
def chunk_gated_delta_rule(q, k, v, g=None, beta=None, **more):
    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
"""
COMPUTE = """
import pathlib, sys, torch
from moejob_trainer.conversion.text_part import open_tensor_source
from moejob_trainer.model_check.reference import ReferenceModel
from transformers import AutoModelForCausalLM

folder = pathlib.Path(sys.argv[1])
states = torch.linspace(-1, 1, 9 * 24).reshape(9, 24)
reference = ReferenceModel(open_tensor_source(folder), folder, torch.float32)
outputs = reference.apply_layers({0: states, 1: states})
print("outputs", *(float(output.abs().sum()) for output in outputs.values()))
AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")(torch.arange(9)[None])
print("Transformers' own model has computed")
"""


@pytest.mark.slow
def test_kernels_that_transformers_finds_installed_compute_nothing_of_the_reference(tmp_path: Path) -> None:
    config = AutoConfig.for_model(**small_config(Family.QWEN3_NEXT))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    kernels = tmp_path / "packages/fla/ops/gated_delta_rule/__init__.py"
    kernels.parent.mkdir(parents=True)
    kernels.write_text(KERNELS)
    without, beside = (compute_reference(tmp_path / "model", path) for path in ("", str(tmp_path / "packages")))
    assert "own model has computed" in without.stdout, without.stderr[-2000:]
    assert "cpu tensor?" in beside.stderr, "Transformers has not taken the package"
    assert beside.stdout.splitlines() == without.stdout.splitlines()[:1]


def compute_reference(model: Path, packages: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPUTE, str(model)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
