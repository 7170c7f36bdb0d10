"""Finds out what builds images here, and has it build."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from image_builds import layouts
from image_builds.bases import on_pinned_bases, pins
from image_builds.commands import Store, Supplies, buildah, buildah_build, docker_build, podman_build
from image_builds.debian_base import BASE, RUNTIME, Base, MissingToolError, archive
from image_builds.recipes import ROOT, TIMESTAMP, Order, Recipe, closure_key

_HOW_TO_GET_ONE = (
    "install docker (with buildx), podman, or, for a machine that reaches Debian's packages and no registry of images, "
    "apt-get install buildah mmdebstrap"
)


class BuildError(Exception):
    """An engine could not build an image."""


class Engine(Protocol):
    """A program that builds images."""

    def build(self, order: Order, supplies: Supplies) -> str:
        """Build an image; say where it is."""


@dataclass(frozen=True, slots=True)
class Docker:
    """The image is in docker's own store."""

    def build(self, order: Order, supplies: Supplies) -> str:
        """Build with BuildKit."""
        _build(docker_build(on_pinned_bases(order, pins(order.context)), supplies), order)
        return f"docker image {order.reference}"


@dataclass(frozen=True, slots=True)
class Podman:
    """The image is in podman's own store."""

    def build(self, order: Order, supplies: Supplies) -> str:
        """Build as the user that calls."""
        _build(podman_build(on_pinned_bases(order, pins(order.context)), supplies), order)
        return f"podman image {order.reference}"


@dataclass(frozen=True, slots=True)
class Buildah:
    """The image lies in the cache as an OCI layout; what it is built from does too, by the pins of its closure."""

    folder: Path

    def build(self, order: Order, supplies: Supplies) -> str:
        """Build from the bases that the order names, else from ones made here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _alone(self.folder / f"{order.recipe.folder}.lock"):
            return f"OCI layout {self._build_image(order, supplies)}"

    def layout(self, recipe: Recipe) -> Path:
        """Return where the image of a recipe is once it is built."""
        return self.folder / "layouts" / recipe.name

    def _build_image(self, order: Order, supplies: Supplies) -> Path:
        order = on_local_bases(order)
        store = self.store(order)
        for base in (BASE, RUNTIME):
            if base.reference in order.arguments.values():
                self._provide(base, store)
        _build(buildah_build(order, supplies, store), order)
        layout = self.layout(order.recipe)
        lasting = self._lasting_layers(order, store)
        if not layouts.holds(layout, lasting):
            self._store_lasting_layers(layout, order.reference, lasting, store)
        _run(buildah(store, "push", "--quiet", order.reference, f"oci:{layout}:{order.reference}"))
        layouts.keep_newest(layout)
        return layout

    def _store_lasting_layers(self, layout: Path, reference: str, lasting: list[str], store: Store) -> None:
        """Copy the layers that last as they are: a push knows such a layer again and does not compress it."""
        with tempfile.TemporaryDirectory(dir=store.folder) as scratch:
            _run(buildah(store, "push", "--quiet", "--disable-compression", reference, f"dir:{scratch}"))
            for digest in lasting:
                layouts.put(layout, Path(scratch) / digest.removeprefix("sha256:"))

    def _lasting_layers(self, order: Order, store: Store) -> list[str]:
        """The digests of what each layer below our code unpacks to, from the base up."""
        said = json.loads(_answer(buildah(store, "inspect", "--type=image", order.reference)))
        layers: list[str] = said["OCIv1"]["rootfs"]["diff_ids"]
        return layers[:-1]

    def store(self, order: Order) -> Store:
        """Return the folder of an order's layers on local bases: one for each closure; that of the pins before goes."""
        folder = self.folder / "stores" / f"{order.recipe.folder}-{closure_key(order)}"
        for before in folder.parent.glob(f"{order.recipe.folder}-*"):
            if before != folder:
                _remove(before)
        folder.mkdir(parents=True, exist_ok=True)
        return Store(folder, "overlay" if _overlays(folder) else "vfs")

    def _provide(self, base: Base, store: Store) -> None:
        looked_for = buildah(store, "inspect", "--type=image", base.reference)
        if subprocess.run(looked_for, capture_output=True, check=False).returncode == 0:
            return
        with _alone(self.folder / "bases.lock"):
            root = archive(base, self.folder)
        container = _answer(buildah(store, "from", "--isolation=chroot", "scratch"))
        _answer(buildah(store, "add", "--quiet", container, str(root), "/"))
        _answer(buildah(store, "commit", "--quiet", "--rm", f"--timestamp={TIMESTAMP}", container, base.reference))


def on_local_bases(order: Order) -> Order:
    """The same order with a base of this machine wherever the Dockerfile takes one and the order names none."""
    bases = {"BASE": BASE.reference, "RUNTIME": RUNTIME.reference} | dict(order.arguments)
    return replace(order, arguments={name: base for name, base in bases.items() if f"ARG {name}=" in order.dockerfile})


def engine(wanted: str, cache: Path) -> Engine:
    """The engine of this name; by no name, the first that works here."""
    found = {
        "docker": lambda: _works("docker", "info"),
        "podman": lambda: _works("podman", "info"),
        "buildah": lambda: _works("buildah", "--version"),
    }
    if wanted and wanted not in found:
        raise MissingToolError(f"ENGINE={wanted} is none of {', '.join(found)}")
    working = next((name for name in ([wanted] if wanted else found) if found[name]()), None)
    match working:
        case "docker":
            return Docker()
        case "podman":
            return Podman()
        case "buildah":
            return Buildah(cache / "images")
        case _:
            raise MissingToolError(f"{wanted or 'nothing that builds images'} does not run here: {_HOW_TO_GET_ONE}")


def _remove(store: Path) -> None:
    """Delete a store. A build that was killed has left mounts in it."""
    mounted = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
    for mount in sorted((place for place in mounted if Path(place).is_relative_to(store)), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=True)
    shutil.rmtree(store)


def _works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    # A client whose server is not there fails, or waits for it.
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _overlays(folder: Path) -> bool:
    """Return whether the kernel can lay folders over one another here; else every layer is a copy."""
    tried = folder / "overlay-tried"
    parts = {name: tried / name for name in ("lower", "upper", "work", "merged")}
    for part in parts.values():
        part.mkdir(parents=True, exist_ok=True)
    options = ",".join(f"{name}dir={parts[name]}" for name in ("lower", "upper", "work"))
    mount = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, str(parts["merged"])]
    try:
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    finally:
        shutil.rmtree(tried)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Two builds at once: the second waits, and finds the work done."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(command: list[str], order: Order) -> None:
    _run(command, order.context, order.dockerfile)


def _run(command: list[str], folder: Path = ROOT, given: str = "") -> None:
    """Return what a builder says matters when it fails."""
    done = subprocess.run(
        command, cwd=folder, input=given, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\nfailed with {done.returncode}:\n{done.stdout[-6000:]}")


def _answer(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
