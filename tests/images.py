"""Owns where the container images of this tree are, and builds those that are not there yet; needs root and buildah."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from image_builds.__main__ import cache, order, supplies
from image_builds.commands import Store, Supplies
from image_builds.engines import Buildah, on_local_bases
from image_builds.recipes import RECIPES, Order


class CannotBuildError(Exception):
    """This machine cannot build images; the message says why."""


def build_image(name: str) -> Path:
    """The folder of an image, as an OCI layout: trainer-cpu, for one. Minutes the first time, then seconds.

    `tar --create --directory FOLDER . | ctr --namespace k8s.io images import -` loads it, as
    docker.io/library/moejob-NAME:VERSION.
    """
    obstacle = find_build_obstacle()
    if obstacle is not None:
        raise CannotBuildError(obstacle)
    with provide_downloads() as local_supplies:
        make_builder().build(order_image(name), local_supplies)
    return make_builder().layout(RECIPES[name])


def find_build_obstacle() -> str | None:
    """Return why no image can be built here; None when nothing is in the way."""
    if os.geteuid() != 0:
        return "only root can mount what images are built in"
    missing = [program for program in ("buildah", "mmdebstrap") if shutil.which(program) is None]
    return f"{' and '.join(missing)} not found: apt-get install buildah mmdebstrap" if missing else None


def make_builder() -> Buildah:
    """Return what builds, with the cache that outlives checkouts."""
    return Buildah(cache(os.environ) / "images")


def order_image(name: str) -> Order:
    """This tree's image of a name, on the bases of this machine."""
    return on_local_bases(order(RECIPES[name], {}))


def find_image_store(name: str) -> Store:
    """Return where the layers of a built image are."""
    return make_builder().store(order_image(name))


@contextmanager
def provide_downloads() -> Iterator[Supplies]:
    """Yield what builds get from this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        yield supplies(os.environ, Path(scratch))
