"""Contents of images: pins, sizes, and that the same tree gives the same layers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from checkouts import copy_checkout
from closures import read_pins
from cluster.extent import with_all_images
from cluster.images.conftest import Builds
from image_builds import layouts
from image_builds.commands import buildah
from image_builds.debian_base import BASE, RUNTIME, archive
from image_builds.engines import Buildah, BuildError
from image_builds.layouts import Layer
from image_builds.recipes import RECIPES, ROOT, TIMESTAMP
from images import make_builder, order_image, provide_downloads

pytestmark = pytest.mark.cluster

MEGABYTE = 1_000_000
IMAGES = {"operator": "operator", "trainer-cpu": "trainer"}
COMPILERS = {"cc", "gcc", "g++", "clang", "ld", "as", "make"}

by_image = pytest.mark.parametrize("name", IMAGES)


def members(layout: Path, layer: Layer) -> Iterator[tarfile.TarInfo]:
    """Yield what is in a layer."""
    with tarfile.open(layout / "blobs" / layer.digest.replace(":", "/")) as archive:
        yield from archive


def ours(layout: Path) -> tuple[Layer, ...]:
    """The layers above the base."""
    return layouts.image(layout).layers[1:]


def parts(layout: Path) -> dict[str, Any]:
    """The list of parts that lies in an image."""
    where = layouts.image(layout).labels["dev.moejob.sbom"].lstrip("/")
    for layer in reversed(ours(layout)):
        with tarfile.open(layout / "blobs" / layer.digest.replace(":", "/")) as archive:
            for member in archive:
                if member.name == where:
                    found: dict[str, Any] = json.load(archive.extractfile(member))  # type: ignore[arg-type]
                    return found
    raise AssertionError(f"no layer has {where}")


def normalized(component: dict[str, Any]) -> tuple[str, str]:
    purl: str = component["purl"]
    name, _, version = purl.removeprefix("pkg:pypi/").partition("@")
    return name, version.partition("?")[0]


@by_image
def test_the_list_of_parts_is_the_closure_that_is_pinned(image: Builds, name: str) -> None:
    listed = parts(image(name))
    assert listed["bomFormat"] == "CycloneDX"
    python = [part for part in listed["components"] if part["purl"].startswith("pkg:pypi/")]
    assert dict(map(normalized, python)) == read_pins(IMAGES[name])


@by_image
def test_the_list_of_parts_has_the_debian_packages_that_copyrights_are_of(image: Builds, name: str) -> None:
    layout = image(name)
    listed = {part["name"] for part in parts(layout)["components"] if part["purl"].startswith("pkg:deb/debian/")}
    names = (member.name.split("/") for layer in layouts.image(layout).layers for member in members(layout, layer))
    # Some have a link to the folder of another package of the same source.
    copyrights = {found[-2] for found in names if found[-4:-2] == ["share", "doc"] and found[-1] == "copyright"}
    assert len(copyrights) > 20
    assert copyrights <= listed


@by_image
def test_labels_say_where_an_image_comes_from(image: Builds, name: str) -> None:
    said = layouts.image(image(name)).labels
    expected = order_image(name).labels
    assert expected.items() <= said.items()
    assert expected["org.opencontainers.image.version"] == (ROOT / "VERSION").read_text().strip()
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", expected["org.opencontainers.image.revision"])


@by_image
def test_the_user_is_a_number_that_the_kubelet_can_check(image: Builds, name: str) -> None:
    assert layouts.image(image(name)).config["config"]["User"] == "65532:65532"


@by_image
def test_the_code_is_the_last_layer_and_small(image: Builds, name: str) -> None:
    layout = image(name)
    code = layouts.image(layout).layers[-1]
    # 408 modules and what is compiled of them; the packages that they import lie in the layers below.
    assert code.bytes < 3 * MEGABYTE
    packages = "opt/moejob/lib/python3.13/site-packages"
    top = {
        PurePosixPath(member.name).relative_to(packages).parts[0]
        for member in members(layout, code)
        if packages + "/" in member.name
    }
    assert top
    assert [found for found in top if not found.startswith("moejob")] == []


def test_the_operator_takes_less_than_150_megabytes_unpacked(image: Builds) -> None:
    layout = image("operator")
    assert (
        sum(member.size for layer in layouts.image(layout).layers for member in members(layout, layer)) < 150 * MEGABYTE
    )


@by_image
def test_every_file_of_ours_has_one_date_and_belongs_to_root(image: Builds, name: str) -> None:
    layout = image(name)
    found = [member for layer in ours(layout) for member in members(layout, layer)]
    assert {member.mtime for member in found} == {TIMESTAMP}
    written = [member for member in found if not member.name.startswith(("tmp", "root"))]
    assert {(member.uid, member.gid) for member in written} == {(0, 0)}
    assert [member.name for member in written if member.isfile() and member.mode & 0o6022] == []


@by_image
def test_what_only_a_build_needs_is_not_there(image: Builds, name: str) -> None:
    layout = image(name)
    names = {PurePosixPath(member.name) for layer in layouts.image(layout).layers for member in members(layout, layer)}
    programs = {path.name for path in names if path.parent.name == "bin"}
    assert programs & (COMPILERS | {"pip", "uv"}) == set()
    # The mount of a cache leaves its empty folder.
    assert [path for path in names if path.parts[0] == "cache" and len(path.parts) > 2] == []
    assert [path for path in names if path.parts[:2] == ("root", ".cache")] == []
    assert [path for path in names if path.parts[:2] == ("run", "secrets") and len(path.parts) > 2] == []


@by_image
def test_every_module_is_compiled_against_its_content(image: Builds, name: str) -> None:
    layout = image(name)
    for layer in ours(layout):
        with tarfile.open(layout / "blobs" / layer.digest.replace(":", "/")) as archive:
            compiled = (member for member in archive if member.name.endswith(".pyc"))
            flags = {archive.extractfile(member).read(8)[4:] for member in compiled}  # type: ignore[union-attr]
        # Bit 0: by hash, not by date; bit 1: compared at each import.
        assert flags <= {(1).to_bytes(4, "little")}


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A build of the operator from any tree, in a store of its own."""

    builder: Buildah

    def build(self, tree: Path) -> Path:
        """The layout of its image."""
        with provide_downloads() as given:
            self.builder.build(replace(order_image("operator"), context=tree), given)
        return self.builder.layout(RECIPES["operator"])

    def buildah(self, *arguments: str) -> str:
        """Return what buildah answers about that store."""
        command = buildah(self.builder.store(order_image("operator")), *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def elsewhere(image: Builds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """A place where nothing was built before. Debian moves on: bases are those made already."""
    folder = tmp_path_factory.mktemp("elsewhere")
    image("operator")
    for base in (BASE, RUNTIME):
        made = archive(base, make_builder().folder)
        os.link(made, folder / made.name) if made.stat().st_dev == folder.stat().st_dev else shutil.copy(made, folder)
    yield Elsewhere(Buildah(folder))
    shutil.rmtree(folder)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of this checkout."""
    return copy_checkout(tmp_path / "tree")


def unpacked(layout: Path) -> list[str]:
    return [layer.unpacked_digest for layer in layouts.image(layout).layers]


@with_all_images
def test_the_same_tree_gives_the_same_layers_and_other_code_only_another_last_one(
    image: Builds, elsewhere: Elsewhere, tree: Path
) -> None:
    before = unpacked(image("operator"))
    assert unpacked(elsewhere.build(tree)) == before
    with (tree / "operator/src/moejob_operator/decide.py").open("a") as module:
        module.write("\n\nCHANGED = True\n")
    after = unpacked(elsewhere.build(tree))
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]


def test_a_build_that_fails_leaves_no_container_behind(elsewhere: Elsewhere, tree: Path) -> None:
    (tree / "operator/pyproject.toml").write_text("no project at all")
    with pytest.raises(BuildError, match="pyproject"):
        elsewhere.build(tree)
    assert elsewhere.buildah("containers", "--quiet") == ""
