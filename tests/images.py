"""Owns where the container images of this tree are, and builds those that are not there yet; needs buildah."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from image_builds.__main__ import cache, order, supplies
from image_builds.engines import Buildah
from image_builds.recipes import RECIPES


class CannotBuildError(Exception):
    """This machine cannot build images; the message says why."""


def built(name: str) -> Path:
    """The folder of an image, as an OCI layout: trainer-cpu, for one. Minutes the first time, then seconds.

    `tar --create --directory FOLDER . | ctr --namespace k8s.io images import -` loads it, as docker.io/library/moejob-NAME:VERSION.
    """
    obstacle = why_not()
    if obstacle is not None:
        raise CannotBuildError(obstacle)
    recipe, buildah = RECIPES[name], Buildah(cache(os.environ) / "images")
    with tempfile.TemporaryDirectory() as scratch:
        buildah.build(order(recipe, os.environ), supplies(os.environ, Path(scratch)))
    return buildah.layout(recipe)


def why_not() -> str | None:
    """Why no image can be built here; None when nothing is in the way."""
    if os.geteuid() != 0:
        return "only root mounts what buildah builds in"
    missing = [program for program in ("buildah", "mmdebstrap") if shutil.which(program) is None]
    return f"{' and '.join(missing)} not found: apt-get install buildah mmdebstrap" if missing else None
