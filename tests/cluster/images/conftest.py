"""Shared parts of the tests of images: images of this tree, built once, and containers of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.control_plane.conftest import definition
from confined import ConfinedContainer, Container, confine_container
from images import build_image, find_build_obstacle, find_image_store

__all__ = ["definition"]

Builds = Callable[[str], Path]
Contains = Callable[[str, Container], ConfinedContainer]


@pytest.fixture(scope="session")
def image(request: pytest.FixtureRequest) -> Builds:
    """The layout of an image. The first run builds it, for minutes, and says so."""
    obstacle = find_build_obstacle()
    if obstacle is not None:
        pytest.skip(f"no images: {obstacle}")
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    done: dict[str, Path] = {}

    def once(name: str) -> Path:
        if name not in done:
            with capturing.global_and_fixture_disabled():
                print(f"building the image {name}", file=sys.stderr, flush=True)  # noqa: T201
                done[name] = build_image(name)
        return done[name]

    return once


@pytest.fixture
def container(image: Builds, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contains]:
    """A container of an image, which goes with the test."""
    with ExitStack() as stack:

        def make(name: str, what: Container) -> ConfinedContainer:
            folder = tmp_path_factory.mktemp("container")
            return stack.enter_context(confine_container(image(name), find_image_store(name), what, folder))

        yield make
