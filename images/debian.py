"""Adds Debian's packages to an image's list of parts: python debian.py SBOM ROOT

`ROOT` is where the image's own root lies while it is built. What dpkg wrote there names each package: in one file where
they were installed, in a file for each where they were only unpacked, as distroless images and our own base are. A root
that does not say which release it is of is of the builder's own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

STATUS = Path("var/lib/dpkg/status")
UNPACKED = Path("var/lib/dpkg/status.d")
RELEASE = "usr/lib/os-release"
_TYPE = "pkg:deb/"


def main(sbom: Path, root: Path) -> None:
    """Write the list again, with the packages that are there now in place of those it knew."""
    listed = json.loads(sbom.read_text())
    others = [part for part in listed.get("components", []) if not part.get("purl", "").startswith(_TYPE)]
    packages = sorted(_packages(root), key=lambda part: str(part["purl"]))
    if not packages:
        sys.exit(f"{root} has neither {STATUS} nor {UNPACKED} with a package in it: what is in this image?")
    sbom.write_text(json.dumps(listed | {"components": others + packages}, indent=2) + "\n")


def _packages(root: Path) -> Iterator[dict[str, Any]]:
    places = (root / RELEASE, Path("/", RELEASE))
    release = _fields(next(place for place in places if place.exists()).read_text(), "=")
    distribution = release["ID"].strip('"')
    suite = f"{distribution}-{release['VERSION_ID']}".replace('"', "")
    for paragraph in _paragraphs(root):
        about = _fields(paragraph, ":")
        # One that was removed leaves its settings, and a line of its name.
        if "Package" not in about or not about.get("Status", "installed").endswith("installed"):
            continue
        name, version = about["Package"], about["Version"]
        place = f"{_TYPE}{distribution}/{name}@{quote(version, safe='')}"
        yield {
            "bom-ref": f"deb:{name}:{about['Architecture']}",
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"{place}?arch={about['Architecture']}&distro={suite}{_upstream(about)}",
        }


def _upstream(about: dict[str, str]) -> str:
    """The source package, by which Debian tells of vulnerabilities, where it has another name or version."""
    source, _, version = about.get("Source", "").partition(" ")
    named = source + (f"@{version.strip('()')}" if version else "")
    return f"&upstream={quote(named, safe='')}" if source else ""


def _paragraphs(root: Path) -> Iterator[str]:
    files = [root / STATUS, *sorted((root / UNPACKED).glob("*"))]
    # Beside the fields of a package distroless images have the sums of its files.
    for file in (file for file in files if file.is_file() and file.suffix != ".md5sums"):
        yield from file.read_text().split("\n\n")


def _fields(paragraph: str, separator: str) -> dict[str, str]:
    lines = (line.partition(separator) for line in paragraph.splitlines() if not line.startswith((" ", "\t")))
    return {name: value.strip() for name, found, value in lines if found}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
