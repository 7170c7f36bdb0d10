"""The commands that build an order with each engine. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from image_builds.recipes import TIMESTAMP, Order


@dataclass(frozen=True, slots=True)
class Store:
    """The place and driver of buildah's layers."""

    folder: Path
    driver: str


@dataclass(frozen=True, slots=True)
class Supplies:
    """Supplies of this machine that stay out of the image: secrets by name, and downloads."""

    secrets: Mapping[str, Path]
    downloads: Path


def docker_build(order: Order, supplies: Supplies) -> list[str]:
    """With docker, into its own store."""
    epoch = _options("--build-arg", [f"SOURCE_DATE_EPOCH={TIMESTAMP}"])
    return ["docker", "buildx", "build", "--load", "--provenance=false", *epoch, *_common(order, supplies)]


def podman_build(order: Order, supplies: Supplies) -> list[str]:
    """With podman, into its own store."""
    return ["podman", "build", *_reproducible(supplies), *_common(order, supplies)]


def buildah(store: Store, *arguments: str) -> list[str]:
    """With buildah, in a store of our own."""
    root = ["--root", str(store.folder / "layers"), "--runroot", str(store.folder / "run")]
    return ["buildah", *root, "--storage-driver", store.driver, *arguments]


def buildah_build(order: Order, supplies: Supplies, store: Store) -> list[str]:
    """With buildah, without a registry and without a runtime for containers."""
    # A step that fails would leave its container behind, and everything that it had written.
    options = ["--isolation", "chroot", "--pull-never", "--force-rm"]
    return buildah(store, "build", *options, *_reproducible(supplies), *_common(order, supplies))


def _reproducible(supplies: Supplies) -> list[str]:
    # Over the cache that the Dockerfile mounts: what make setup has downloaded is there already.
    downloads = ["--volume", f"{supplies.downloads}:/cache/moejob"]
    return ["--layers", "--format", "oci", "--timestamp", str(TIMESTAMP), *downloads]


def _common(order: Order, supplies: Supplies) -> list[str]:
    return [
        # What the order says of its Dockerfile comes on the standard input.
        *("--file", "-", "--target", order.recipe.target, "--tag", order.reference),
        # Not LABEL with arguments of the build: buildah takes such a step for the one it did with other arguments.
        *_options("--label", _pairs(order.labels)),
        *_options("--build-arg", _pairs(order.arguments)),
        *_options("--secret", (f"id={name},src={file}" for name, file in supplies.secrets.items())),
        ".",
    ]


def _options(option: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _pairs(given: Mapping[str, str]) -> Iterable[str]:
    return (f"{name}={value}" for name, value in given.items())
