"""The places where a config.json is sought, their order, and the messages when it is not there or not one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from model_configs import config
from moejob_api.models import catalog
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family, ModelShape
from moejob_api.models.sources import LARGEST_CONFIG_BYTES, ModelConfig, UnseenModel, model_shape, read_model_config
from moejob_api.problems import InvalidSpec, Rule

SMALL = config(Family.MIXTRAL)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def folder_with(path: Path, values: Mapping[str, Any] = SMALL) -> Path:
    """A folder that holds a config.json."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return path


def cached(hub: Path, name: str, commit: str = COMMIT, branch: str | None = "main", **changes: Any) -> None:
    """A model in a Hugging Face cache, as huggingface_hub lays it out: a snapshot of links, a branch that names it."""
    model = hub / f"models--{name.replace('/', '--')}"
    blob = model / "blobs" / commit
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_text(json.dumps(SMALL | changes))
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(blob)
    if branch is not None:
        ref = model / "refs" / branch
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)


def refusal(source: str, **options: Any) -> str:
    """The message with which a source is refused."""
    with pytest.raises(InvalidSpec) as caught:
        read_model_config(source, environment={}, **options)
    (problem,) = caught.value.problems
    assert problem.rule is Rule.MODEL_CONFIG
    assert problem.path == "spec.model.source"
    return problem.message


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Paths


def test_a_folder_with_a_config_is_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model")
    assert read_model_config(str(folder), environment={}) == ModelConfig(str(folder / "config.json"), SMALL)


def test_a_json_file_of_any_name_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mixtral.json"
    file.write_text(json.dumps(SMALL))
    assert read_model_config(str(file), environment={}) == ModelConfig(str(file), SMALL)


@pytest.mark.parametrize("source", ["./model", "model", "organization/model", "../{}/model"])
def test_a_relative_path_is_read(elsewhere: Path, source: str) -> None:
    path = source.format(elsewhere.name)
    folder_with(elsewhere / path)
    assert isinstance(read_model_config(path, environment={}), ModelConfig)


def test_the_working_directory_is_read(elsewhere: Path) -> None:
    folder_with(elsewhere)
    assert isinstance(read_model_config(".", environment={}), ModelConfig)


def test_a_folder_here_comes_before_a_model_of_the_same_name(elsewhere: Path) -> None:
    folder_with(elsewhere / "Qwen/Qwen3-30B-A3B")
    assert model_shape("Qwen/Qwen3-30B-A3B", environment={}) == shape_of(SMALL)


def test_the_shape_of_a_model_on_disk_is_that_of_its_config(tmp_path: Path) -> None:
    assert model_shape(str(folder_with(tmp_path)), environment={}) == shape_of(SMALL)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMALL).encode())
    assert isinstance(read_model_config(str(tmp_path), environment={}), ModelConfig)


@pytest.mark.parametrize("source", ["./nowhere", "../nowhere", "./nowhere/config.json", "./a\0b", f"./{'a' * 4000}"])
def test_a_relative_path_that_is_not_here_may_be_what_a_run_is_going_to_export(elsewhere: Path, source: str) -> None:
    assert not list(elsewhere.iterdir())
    found = read_model_config(source, environment={})
    assert isinstance(found, UnseenModel)
    assert "the folder that the job is run from has to have it" in found.reason


@pytest.mark.parametrize("source", ["/nowhere/model", "/nowhere/config.json", "/a\0b"])
def test_an_absolute_path_that_is_not_here_may_be_in_the_image(source: str) -> None:
    found = read_model_config(source, environment={})
    assert isinstance(found, UnseenModel)
    assert "the image or the volume has to have it" in found.reason


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert refusal(str(tmp_path)).startswith(f"there is no {tmp_path}/config.json that can be read")


def test_a_link_that_leads_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "gone")
    assert refusal(str(tmp_path)).startswith(f"there is no {tmp_path}/config.json that can be read")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "is not JSON", id="empty"),
        pytest.param(b"{", "is not JSON", id="cut off"),
        pytest.param(b"model_type: llama", "is not JSON", id="YAML"),
        pytest.param(b'{"model_type": "\xff"}', "is not JSON", id="not UTF-8"),
        pytest.param(b'{"vocab_size": ' + b"9" * 5000 + b"}", "is not JSON", id="a number Python does not read"),
        pytest.param(b"[" * 200_000, "is not JSON", id="nested without end"),
        pytest.param(b"[1, 2]", "holds [1, 2]; expected a JSON object", id="a list"),
        pytest.param(b"null", "holds null; expected a JSON object", id="null"),
        pytest.param(b" " * (LARGEST_CONFIG_BYTES + 1), "is larger than 4 MiB", id="too large"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    assert refusal(str(tmp_path)).startswith(f"{file} {says}")


def test_a_folder_called_config_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "is not a regular file" in refusal(str(tmp_path))


def test_a_device_is_refused_before_it_is_read() -> None:
    assert refusal("/dev/zero").startswith("/dev/zero is not a regular file")


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that root cannot read either")
def test_a_file_that_cannot_be_read_is_refused_with_the_reason() -> None:
    assert refusal("/proc/self/mem") == "/proc/self/mem cannot be read: Input/output error"


def test_a_wrong_key_is_refused_with_the_file_it_is_in(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SMALL | {"vocab_size": 0})
    with pytest.raises(InvalidSpec, match=f"{folder}/config.json: vocab_size is 0"):
        model_shape(str(folder), environment={})


# The disk of another machine


@pytest.mark.parametrize("source", ["{}", "{}/config.json", "./model", "..", "/proc/self/mem"])
def test_a_path_on_another_machine_is_not_opened(tmp_path: Path, source: str) -> None:
    source = source.format(folder_with(tmp_path))
    unseen = read_model_config(source, local_paths=False, environment={})
    assert unseen == UnseenModel(f"{source} is a path on another machine")


def test_a_folder_of_the_operator_never_stands_in_for_a_model(elsewhere: Path) -> None:
    folder_with(elsewhere / "Qwen/Qwen3-30B-A3B")
    shape = model_shape("Qwen/Qwen3-30B-A3B", local_paths=False, environment={})
    assert isinstance(shape, ModelShape)
    assert len(shape.layers) == 48


def test_a_volume_is_not_seen() -> None:
    unseen = model_shape("pvc://models/qwen", environment={})
    assert unseen == UnseenModel("pvc://models/qwen lies on a volume, which cannot be read from here")


# The Hugging Face cache


@pytest.mark.parametrize(
    ("environment", "hub"),
    [
        pytest.param({"HF_HUB_CACHE": "{}/a"}, "a", id="HF_HUB_CACHE"),
        pytest.param({"HUGGINGFACE_HUB_CACHE": "{}/a"}, "a", id="its older name"),
        pytest.param({"HF_HOME": "{}/a"}, "a/hub", id="HF_HOME"),
        pytest.param({"XDG_CACHE_HOME": "{}/a"}, "a/huggingface/hub", id="XDG_CACHE_HOME"),
        pytest.param({"HF_HUB_CACHE": "{}/a", "HF_HOME": "{}/b"}, "a", id="HF_HUB_CACHE before HF_HOME"),
        pytest.param({"HF_HOME": "{}/a", "XDG_CACHE_HOME": "{}/b"}, "a/hub", id="HF_HOME before XDG_CACHE_HOME"),
        pytest.param({"HF_HUB_CACHE": "", "HF_HOME": "{}/a"}, "a/hub", id="an empty variable counts as none"),
    ],
)
def test_the_cache_lies_where_huggingface_hub_puts_it(tmp_path: Path, environment: dict[str, str], hub: str) -> None:
    cached(tmp_path / hub, "organization/model")
    here = {name: value.format(tmp_path) for name, value in environment.items()}
    assert model_shape("organization/model", environment=here) == shape_of(SMALL)


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    cached(tmp_path / ".cache/huggingface/hub", "organization/model")
    assert model_shape("organization/model", environment={}) == shape_of(SMALL)


def test_the_cache_comes_before_the_catalog(tmp_path: Path) -> None:
    cached(tmp_path, "Qwen/Qwen3-30B-A3B")
    assert model_shape("Qwen/Qwen3-30B-A3B", environment={"HF_HUB_CACHE": str(tmp_path)}) == shape_of(SMALL)


@pytest.mark.parametrize(
    ("revision", "vocabulary"),
    [
        pytest.param(None, 100, id="the main branch by default"),
        pytest.param("main", 100, id="a branch"),
        pytest.param("refs/pr/7", 200, id="a pull request"),
        pytest.param("b" * 40, 200, id="a commit"),
    ],
)
def test_the_revision_chooses_the_snapshot(tmp_path: Path, revision: str | None, vocabulary: int) -> None:
    cached(tmp_path, "organization/model", "a" * 40, "main", vocab_size=100)
    cached(tmp_path, "organization/model", "b" * 40, "refs/pr/7", vocab_size=200)
    shape = model_shape("organization/model", revision, environment={"HF_HUB_CACHE": str(tmp_path)})
    assert isinstance(shape, ModelShape)
    assert shape.vocabulary == vocabulary


@pytest.mark.parametrize("revision", ["c" * 40, "other", "../../../organization/model", "a\0b", "a" * 4000])
def test_a_revision_that_is_not_in_the_cache_is_unseen(tmp_path: Path, revision: str) -> None:
    cached(tmp_path, "organization/model")
    assert isinstance(
        model_shape("organization/model", revision, environment={"HF_HUB_CACHE": str(tmp_path)}), UnseenModel
    )


def test_a_model_in_the_cache_without_its_config_is_unseen(tmp_path: Path) -> None:
    cached(tmp_path, "organization/model")
    next(tmp_path.glob("*/snapshots/*/config.json")).unlink()
    assert isinstance(model_shape("organization/model", environment={"HF_HUB_CACHE": str(tmp_path)}), UnseenModel)


def test_a_broken_config_in_the_cache_is_refused_by_name(tmp_path: Path) -> None:
    cached(tmp_path, "organization/model")
    next(tmp_path.glob("*/blobs/*")).write_text("{")
    with pytest.raises(InvalidSpec, match=f"snapshots/{COMMIT}/config.json is not JSON"):
        model_shape("organization/model", environment={"HF_HUB_CACHE": str(tmp_path)})


# The catalog


def test_a_known_name_is_read_from_the_catalog(elsewhere: Path) -> None:
    found = read_model_config("mistralai/mixtral-8x7b-instruct-v0.1", environment={"HF_HUB_CACHE": str(elsewhere)})
    config_of_mixtral = catalog.find_config("mistralai/Mixtral-8x7B-v0.1")
    assert config_of_mixtral is not None
    assert found == ModelConfig("shipped config.json of mistralai/mixtral-8x7b-instruct-v0.1", config_of_mixtral)


def test_a_pinned_revision_of_a_known_name_is_read_from_the_catalog(elsewhere: Path) -> None:
    shape = model_shape("Qwen/Qwen3-30B-A3B", COMMIT, environment={"HF_HUB_CACHE": str(elsewhere)})
    assert isinstance(shape, ModelShape)


def test_an_unknown_name_is_unseen_and_near_ones_are_named(elsewhere: Path) -> None:
    unseen = read_model_config("Qwen/Qwen3-30B-A4B", environment={"HF_HUB_CACHE": str(elsewhere)})
    assert isinstance(unseen, UnseenModel)
    assert unseen.near[0] == "Qwen/Qwen3-30B-A3B"
    assert unseen.reason.startswith(
        "Qwen/Qwen3-30B-A4B is neither in the Hugging Face cache of this machine nor known to moejob; "
        "did you mean Qwen/Qwen3-30B-A3B"
    )


def test_an_unknown_name_like_no_other_is_unseen_without_a_guess(elsewhere: Path) -> None:
    unseen = read_model_config("zzzzzzzz/0000000000", environment={"HF_HUB_CACHE": str(elsewhere)})
    assert unseen == UnseenModel(
        "zzzzzzzz/0000000000 is neither in the Hugging Face cache of this machine nor known to moejob"
    )


@pytest.mark.parametrize(
    "source", ["", "mixtral", "a/b/c", "s3://bucket/model", "Qwen / Qwen3", "a/b..c", "-a/b", "ä/b", "a/b\n", "a\0/b"]
)
@pytest.mark.parametrize("local_paths", [True, False])
def test_what_is_neither_name_nor_path_is_refused(elsewhere: Path, source: str, local_paths: bool) -> None:
    assert not list(elsewhere.iterdir())
    message = refusal(source, local_paths=local_paths)
    assert "is neither a Hugging Face name (organization/model) nor pvc://claim/path" in message


def test_a_name_without_its_organization_is_refused_with_the_whole_name(elsewhere: Path) -> None:
    assert not list(elsewhere.iterdir())
    assert "did you mean Qwen/Qwen3-30B-A3B" in refusal("Qwen3-30B-A3B")
