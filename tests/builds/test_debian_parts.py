"""Debian's packages of an image are in its list of parts, beside those of Python."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "images" / "debian.py"
PYTHON_PART = {"name": "pydantic", "purl": "pkg:pypi/pydantic@2.0"}
STATUS = "Status: install ok installed\nArchitecture: amd64\n"
LIBC = f"Package: libc6\n{STATUS}Version: 2.36-9+deb12u10\nDescription: C\n Package: none\n"
REMOVED = "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
BASE_FILES = "Package: base-files\nVersion: 12.4+deb12u11\nArchitecture: amd64\n"


def listed(folder: Path, files: Mapping[str, str | None], runs: int = 1) -> list[dict[str, Any]]:
    """The parts of an image whose root has these files."""
    sbom, root = folder / "sbom.json", folder / "root"
    sbom.write_text(json.dumps({"bomFormat": "CycloneDX", "components": [PYTHON_PART]}))
    for name, content in {"usr/lib/os-release": 'ID=debian\nVERSION_ID="12"\n', **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            (root / name).write_text(content)
    for _ in range(runs):
        subprocess.run([sys.executable, PROGRAM, sbom, root], check=True, capture_output=True, text=True)
    found: list[dict[str, Any]] = json.loads(sbom.read_text())["components"]
    return found


@pytest.mark.parametrize("runs", [1, 2])
def test_installed_packages_are_listed_once_and_removed_ones_are_not(tmp_path: Path, runs: int) -> None:
    python, libc = listed(tmp_path, {"var/lib/dpkg/status": f"{LIBC}\n{REMOVED}"}, runs)
    assert python == PYTHON_PART
    assert libc == {
        "bom-ref": "deb:libc6:amd64",
        "type": "library",
        "name": "libc6",
        "version": "2.36-9+deb12u10",
        "purl": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=amd64&distro=debian-12",
    }


@pytest.mark.parametrize(
    ("source", "upstream"),
    [
        pytest.param("", "", id="of the same name"),
        pytest.param("Source: glibc\n", "&upstream=glibc", id="another name"),
        pytest.param("Source: gcc-defaults (1.203)\n", "&upstream=gcc-defaults%401.203", id="another version too"),
    ],
)
def test_the_source_of_a_package_is_named_by_which_vulnerabilities_are_known(
    tmp_path: Path, source: str, upstream: str
) -> None:
    _, found = listed(tmp_path, {"var/lib/dpkg/status": f"Package: libc6\n{STATUS}{source}Version: 2.36\n"})
    assert found["purl"] == f"pkg:deb/debian/libc6@2.36?arch=amd64&distro=debian-12{upstream}"


def test_packages_that_were_only_unpacked_are_listed(tmp_path: Path) -> None:
    status = {"base": BASE_FILES, "base.md5sums": "0123  usr/lib/os-release\n"}
    files = {f"var/lib/dpkg/status.d/{name}": content for name, content in status.items()}
    assert [part["name"] for part in listed(tmp_path, {**files, "var/lib/dpkg/status": ""})] == [
        "pydantic",
        "base-files",
    ]


def test_a_root_that_does_not_name_its_release_is_of_the_builders(tmp_path: Path) -> None:
    _, base = listed(tmp_path, {"var/lib/dpkg/status.d/base": BASE_FILES, "usr/lib/os-release": None})
    builders = dict(line.split("=", 1) for line in Path("/usr/lib/os-release").read_text().splitlines() if "=" in line)
    assert base["purl"].endswith(f"&distro={builders['ID']}-{builders['VERSION_ID']}".replace('"', ""))


def test_an_image_without_any_is_no_image_of_ours(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as failed:
        listed(tmp_path, {})
    assert "what is in this image?" in failed.value.stderr
