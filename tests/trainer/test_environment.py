"""The trainer environment is its closure and the tools, nothing else, and all of it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from closures import find_modules, find_strays, import_errors, wrong_versions

MODULES = find_modules("trainer")
# Stubs for gRPC among messages that OpenTelemetry sends over HTTP.
STUBS = tuple(f"google.longrunning.operations_{stub}" for stub in ("grpc", "grpc_pb2", "pb2_grpc"))
# Without Transformer Engine it loads with stand-ins for what it names and never uses: `megatron_models/bridge.py`.
WITH_STAND_INS = "megatron.bridge"
NAMES = [module for tops in MODULES.values() for module in tops if module not in (*STUBS, WITH_STAND_INS)]
# Wheels of shared libraries that torch loads by path: nothing in them can be imported.
LIBRARIES = ("cuda-toolkit", "nvidia-")


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return import_errors(NAMES, tmp_path_factory.mktemp("imports") / "errors.json")


@pytest.mark.parametrize("module", NAMES)
def test_every_module_of_the_closure_loads(module: str, errors: dict[str, str]) -> None:
    assert errors.get(module) is None


def test_every_distribution_of_the_closure_has_a_module_or_is_a_library_of_nvidia() -> None:
    assert [name for name, tops in MODULES.items() if not tops and not name.startswith(LIBRARIES)] == []


def test_the_program_of_a_rank_loads_no_bridge_before_a_job_wants_megatrons_models() -> None:
    program = (
        "import sys, moejob_trainer.rank; print(*{'megatron.core', 'megatron.bridge', 'omegaconf'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["megatron.core"]


def test_versions_are_the_pinned_ones() -> None:
    assert wrong_versions("trainer") == {}


def test_nothing_else_is_installed() -> None:
    assert find_strays("trainer") == set()
