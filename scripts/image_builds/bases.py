"""make bases: writes down the digests of the images that ours stand on; with --check it says which have none.

A tag stands for another image each week. images/bases.txt says for which one when it was last looked up, so that a new
base comes by a commit; engines that pull take the digest. Without the file the tags hold, and a release ends.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from image_builds.recipes import RECIPES, ROOT, Order
from image_builds.registries import UnknownDigestError, digest_of

FILE = "images/bases.txt"
_ARGUMENT = re.compile(r"^ARG (BASE|RUNTIME)=(\S+)$", re.MULTILINE)
_PIN = re.compile(r"(?P<image>[^@\s]+)@(?P<digest>sha256:[0-9a-f]{64})")
_HEAD = "# The images that ours stand on, by digest. Written by `make bases`.\n"


class BadPinsError(Exception):
    """The file of digests holds something else."""


def main(arguments: Sequence[str], root: Path = ROOT, ask: Callable[[str], str] = digest_of) -> int:
    """Look up all bases and write them down, or with --check say which have no digest there."""
    images = sorted({image for dockerfile in _dockerfiles(root) for _, image in named_bases(dockerfile)})
    try:
        if "--check" in arguments:
            return _check_images(images, pins(root))
        text = _HEAD + "".join(f"{image}@{ask(image)}\n" for image in images)
    except (BadPinsError, UnknownDigestError) as problem:
        _say(str(problem))
        return 1
    # All of them or none: half of it would look like the whole.
    (root / FILE).write_text(text)
    _say(f"{FILE} has the digests of today; build, test the images, and commit it")
    return 0


def named_bases(dockerfile: str) -> list[tuple[str, str]]:
    """The arguments of a Dockerfile that name bases, and the images by which they do. Pure."""
    return _ARGUMENT.findall(dockerfile)


def pins(root: Path = ROOT) -> Mapping[str, str]:
    """The digest of each image in the file; none where there is no file."""
    file = root / FILE
    lines = file.read_text().splitlines() if file.exists() else []
    return dict(_pin(line) for line in lines if line and not line.startswith("#"))


def on_pinned_bases(order: Order, digests: Mapping[str, str]) -> Order:
    """The same order with the digest of each base that its Dockerfile names and the order does not. Pure."""
    found = {name: f"{image}@{digests[image]}" for name, image in named_bases(order.dockerfile) if image in digests}
    return replace(order, arguments=found | dict(order.arguments))


def _dockerfiles(root: Path) -> Iterable[str]:
    return ((root / path).read_text() for path in sorted({recipe.dockerfile for recipe in RECIPES.values()}))


def _pin(line: str) -> tuple[str, str]:
    found = _PIN.fullmatch(line)
    if found is None:
        raise BadPinsError(
            f"{FILE} has a line that is no IMAGE:TAG@sha256:DIGEST: {line!r}; write it with `make bases`"
        )
    return found["image"], found["digest"]


def _check_images(images: Iterable[str], digests: Mapping[str, str]) -> int:
    missing = [image for image in images if image not in digests]
    for image in missing:
        _say(
            f"{image} has no digest in {FILE}; run the workflow bases, or `make bases` where its registry can be "
            "reached, and commit the file"
        )
    return 1 if missing else 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
