"""An engine that cannot work ends at once: without the secret of its job, or the plugin that vLLM is to load."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from engines import PYTHON, engine_environment
from moejob_api.contract.pods import Environment, ExitCode


@pytest.mark.parametrize("secret", [pytest.param(None, id="none"), pytest.param("", id="an empty one")])
def test_an_engine_without_a_secret_ends_with_78_where_others_reach_it(secret: str | None, tmp_path: Path) -> None:
    said = engine_environment(tmp_path, ["http://192.0.2.7:8000"]) | {Environment.HOST.value: "192.0.2.7"}
    del said[Environment.SECRET]
    # Engines that other tests run in this process leave theirs behind.
    mine = {name: value for name, value in os.environ.items() if name != Environment.SECRET.value}
    environ = mine | said | ({} if secret is None else {Environment.SECRET.value: secret})
    ended = subprocess.run(
        [PYTHON, "-m", "moejob_rollout"], env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == ExitCode.BAD_CONFIGURATION
    assert "MOEJOB_SECRET is not set, and 192.0.2.7 can be reached by others" in ended.stderr


def test_an_engine_whose_plugin_vllm_cannot_find_ends_with_78(tmp_path: Path) -> None:
    # All that is installed, less what says that moejob-rollout is.
    packages = tmp_path / "packages"
    packages.mkdir()
    for found in Path(sysconfig.get_path("purelib")).iterdir():
        if not found.name.startswith("moejob_rollout-"):
            (packages / found.name).symlink_to(found)
    source = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (source / "rollout/src", source / "crds/src", packages)))
    environ = os.environ | engine_environment(tmp_path, ["http://127.0.0.1:8000"]) | {"PYTHONPATH": path}
    ended = subprocess.run(
        [PYTHON, "-S", "-m", "moejob_rollout"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == ExitCode.BAD_CONFIGURATION, ended.stderr
    assert "has only files of this; install moejob-rollout there" in ended.stderr
