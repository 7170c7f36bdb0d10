"""make images: builds what IMAGES names; PREFIX, TAG, ENGINE, BASE and RUNTIME are settings, see docs/images.md."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from image_builds.bases import BadPinsError
from image_builds.commands import Supplies
from image_builds.debian_base import MissingToolError
from image_builds.engines import BuildError, engine
from image_builds.recipes import ROOT, Order, Recipe, Tree, UnknownImageError, chosen, labels, reference

# Those that the chart names.
DEFAULT = "operator trainer rollout trainer-colocated"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def main(settings: Mapping[str, str]) -> int:
    """Build what is asked for, and say where each image is."""
    try:
        recipes = chosen(settings.get("IMAGES") or DEFAULT)
        builder = engine(settings.get("ENGINE", ""), cache(settings))
        with tempfile.TemporaryDirectory() as scratch:
            given = supplies(settings, Path(scratch))
            for recipe in recipes:
                started = time.monotonic()
                where = builder.build(order(recipe, settings), given)
                _say(f"{recipe.name}: {where} ({time.monotonic() - started:.0f} s)")
    except (UnknownImageError, MissingToolError, BadPinsError, BuildError) as problem:
        _say(str(problem))
        return 1
    return 0


def order(recipe: Recipe, settings: Mapping[str, str]) -> Order:
    """Return what is to be built of this tree."""
    tree = Tree((ROOT / "VERSION").read_text().strip(), _revision())
    named = reference(recipe, settings.get("PREFIX", ""), settings.get("TAG") or tree.version)
    arguments = {name: settings[name] for name in ("BASE", "RUNTIME") if settings.get(name)}
    return Order(recipe, named, labels(tree), arguments)


def supplies(settings: Mapping[str, str], scratch: Path) -> Supplies:
    """The user's own index and certificates, as pip knows them, and what make setup has downloaded."""
    secrets: dict[str, Path] = {}
    certificates = Path(settings.get("PIP_CERT") or settings.get("SSL_CERT_FILE") or _CERTIFICATES)
    if certificates.exists():
        secrets["certificates"] = certificates
    if settings.get("PIP_INDEX_URL"):
        secrets["index"] = scratch / "index"
        secrets["index"].write_text(settings["PIP_INDEX_URL"])
    downloads = cache(settings)
    downloads.mkdir(parents=True, exist_ok=True)
    return Supplies(secrets, downloads)


def cache(settings: Mapping[str, str]) -> Path:
    """The folder that outlives checkouts."""
    home = settings.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(settings.get("MOEJOB_CACHE") or Path(home) / "moejob")


def _revision() -> str:
    """The commit, and whether the tree is another than that."""
    asked = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Only --help: an argument that went unread would build 20 GB.
    argparse.ArgumentParser(prog="python -m image_builds", description=__doc__).parse_args()
    sys.exit(main(os.environ))
