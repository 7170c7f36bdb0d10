"""Finds the programs a cluster is made of, and builds with Go those the machine lacks; knows nothing of how they run.

    PYTHONPATH=tests python -m cluster.binaries [PROGRAM...]

What is pinned stands in tools/*/go.mod. A program of the pinned minor version in $KUBEBUILDER_ASSETS or $PATH is taken
as it is; all others are built once, into the cache folder, which outlives the checkout.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

TOOLS = Path(__file__).parent / "tools"
VERSION_TIMEOUT_SECONDS = 20

Report = Callable[[str], None]


class MissingProgramError(Exception):
    """A program is neither there nor can it be built here."""


class BuildError(Exception):
    """Go is there and could not build a program."""


class Version(NamedTuple):
    """A released version."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


@dataclass(frozen=True, slots=True)
class Tool:
    """One Go module of tools/: the module it pins, and the variables that its linker sets."""

    name: str
    pins: str
    stamps: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Return where its go.mod is."""
        return TOOLS / self.name

    @property
    def version(self) -> Version:
        """The version of what it pins."""
        pinned = re.search(rf"^(?:require |\t){self.pins} v(\S+)", (self.folder / "go.mod").read_text(), re.MULTILINE)
        if pinned is None:
            raise BuildError(f"{self.folder}/go.mod does not require {self.pins}")
        return _version(pinned[1], self.pins)

    @property
    def release(self) -> str:
        """Return what its programs are kept under: its name and version, and the sources where some are ours."""
        ours = b"".join(file.read_bytes() for file in sorted(self.folder.rglob("*.go")))
        suffix = f"-{hashlib.sha256(ours).hexdigest()[:8]}" if ours else ""
        return f"{self.name}-{self.version}{suffix}"

    @property
    def linker_flags(self) -> str:
        """Return what makes a program small and lets it know its version."""
        return " ".join(["-s -w", *(f"-X {stamp}".format(v=self.version) for stamp in self.stamps)])


@dataclass(frozen=True, slots=True)
class Program:
    """One program, the package it is built from, and how it is asked for its version."""

    tool: Tool
    package: str
    asks_version: tuple[str, ...] = ("--version",)


KUBERNETES = Tool(
    "kubernetes",
    pins="k8s.io/kubernetes",
    stamps=(
        "k8s.io/component-base/version.gitVersion=v{v}",
        "k8s.io/component-base/version.gitMajor={v.major}",
        "k8s.io/component-base/version.gitMinor={v.minor}",
    ),
)
ETCD = Tool("etcd", pins="go.etcd.io/etcd/server/v3")
HELM = Tool("helm", pins="helm.sh/helm/v4", stamps=("helm.sh/helm/v4/internal/version.version=v{v}",))
KWOK = Tool("kwok", pins="sigs.k8s.io/kwok")
CONTAINERD = Tool(
    "containerd",
    pins="github.com/containerd/containerd/v2",
    stamps=("github.com/containerd/containerd/v2/version.Version=v{v}",),
)
CNI = Tool("cni", pins="github.com/containernetworking/plugins")
COREDNS = Tool("coredns", pins="github.com/coredns/coredns")
KUBE_ROUTER = Tool(
    "kube-router",
    pins="github.com/cloudnativelabs/kube-router/v2",
    stamps=("github.com/cloudnativelabs/kube-router/v2/pkg/version.Version=v{v}",),
)
PEERS = Tool("peers", pins="github.com/kubeflow/training-operator")

PROGRAMS: Mapping[str, Program] = {
    "etcd": Program(ETCD, "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": Program(KUBERNETES, "k8s.io/kubernetes/cmd/kube-apiserver"),
    "kube-controller-manager": Program(KUBERNETES, "k8s.io/kubernetes/cmd/kube-controller-manager"),
    "kube-scheduler": Program(KUBERNETES, "k8s.io/kubernetes/cmd/kube-scheduler"),
    "kubectl": Program(KUBERNETES, "k8s.io/kubernetes/cmd/kubectl", ("version", "--client")),
    "kubelet": Program(KUBERNETES, "k8s.io/kubernetes/cmd/kubelet"),
    "kube-proxy": Program(KUBERNETES, "k8s.io/kubernetes/cmd/kube-proxy"),
    "kwok": Program(KWOK, "sigs.k8s.io/kwok/cmd/kwok"),
    "helm": Program(HELM, "helm.sh/helm/v4/cmd/helm", ("version", "--short")),
    "containerd": Program(CONTAINERD, "github.com/containerd/containerd/v2/cmd/containerd"),
    "containerd-shim-runc-v2": Program(
        CONTAINERD, "github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2", ("-v",)
    ),
    "ctr": Program(CONTAINERD, "github.com/containerd/containerd/v2/cmd/ctr"),
    "pause": Program(CONTAINERD, "./pause"),
    "bridge": Program(CNI, "github.com/containernetworking/plugins/plugins/main/bridge"),
    "host-local": Program(CNI, "github.com/containernetworking/plugins/plugins/ipam/host-local"),
    "loopback": Program(CNI, "github.com/containernetworking/plugins/plugins/main/loopback"),
    "coredns": Program(COREDNS, ".", ("-version",)),
    # Of `make test-policies` only.
    "kube-router": Program(KUBE_ROUTER, "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"),
    # Of benchmarks only.
    "training-operator": Program(PEERS, "."),
}
_OF_A_CLUSTER = tuple(name for name, program in PROGRAMS.items() if program.tool not in (KUBE_ROUTER, PEERS))


def find_or_build(names: Iterable[str], report: Report) -> dict[str, Path]:
    """Return where each program is. Builds those that are nowhere, and names all that cannot be built."""
    found = {name: _found(name) for name in names}
    absent = [name for name, path in found.items() if path is None]
    obstacle = _go_obstacle() if absent else None
    if obstacle is not None:
        wanted = ", ".join(f"{name} {PROGRAMS[name].tool.version}" for name in absent)
        raise MissingProgramError(
            f"{wanted}: not in $KUBEBUILDER_ASSETS, $PATH or {cache()}, nor to be built: {obstacle}; "
            "install Go, or set $KUBEBUILDER_ASSETS to where they are"
        )
    return {name: path or _built(name, report) for name, path in found.items()}


def _found(name: str) -> Path | None:
    tool = PROGRAMS[name].tool
    for candidate in _installed(name):
        version = _version_of(candidate, PROGRAMS[name].asks_version)
        if version is not None and version[:2] == tool.version[:2]:
            return candidate
    built = _build_target(name)
    return built if built.exists() else None


def _installed(name: str) -> Iterator[Path]:
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    for search in (assets, os.environ.get("PATH")):
        path = shutil.which(name, path=search) if search else None
        if path is not None:
            yield Path(path)


def _version_of(program: Path, arguments: tuple[str, ...]) -> Version | None:
    """Return what the program itself says; None from one that does not run here."""
    try:
        asked = subprocess.run(
            [program, *arguments], capture_output=True, text=True, check=True, timeout=VERSION_TIMEOUT_SECONDS
        )
        return _version(asked.stdout, str(program))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _version(text: str, where: str) -> Version:
    number = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
    if number is None:
        raise ValueError(f"{where}: no version in {text[:80]!r}")
    return Version(*map(int, number.groups()))


def cache() -> Path:
    """Return where programs are kept, beside all else that clusters keep."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MOEJOB_CACHE") or Path(home) / "moejob") / "cluster"


def _build_target(name: str) -> Path:
    tool = PROGRAMS[name].tool
    return cache() / tool.release / name


def _go_obstacle() -> str | None:
    """Return why nothing can be built; None when Go is there and new enough for what is pinned."""
    go = shutil.which("go")
    if go is None:
        return "there is no go in $PATH"
    # Asked beside a go.mod, an older Go either fetches the one it needs or says why not.
    asked = subprocess.run([go, "version"], cwd=KUBERNETES.folder, capture_output=True, text=True, check=False)
    return asked.stderr.strip() if asked.returncode else None


def _built(name: str, report: Report) -> Path:
    target = _build_target(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with alone(target.parent, report):
        if not target.exists():
            _build(name, target, report)
    return target


@contextmanager
def alone(folder: Path, report: Report) -> Iterator[None]:
    """Two runs at once: the second waits, and finds the work done."""
    with folder.with_name(f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"waiting for another build into {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(name: str, target: Path, report: Report) -> None:
    program = PROGRAMS[name]
    report(f"building {name} {program.tool.version}")
    started = time.monotonic()
    go_build(program.tool.folder, program.package, program.tool.linker_flags, target)
    report(f"built {name} in {time.monotonic() - started:.0f} s, {target.stat().st_size >> 20} MiB")


def go_build(folder: Path, package: str, linker_flags: str, target: Path) -> None:
    """Build a package of the module in a folder. BuildError when Go cannot."""
    unfinished = target.with_name(f".{target.name}.unfinished")
    flags = ["-trimpath", "-ldflags", linker_flags, "-o", str(unfinished)]
    # Compilers that collect their garbage less often take 14% less time.
    patient = {"GOGC": os.environ.get("GOGC", "400")}
    done = subprocess.run(
        [shutil.which("go") or "go", "build", *flags, package],
        cwd=folder,
        env=os.environ | patient | {"CGO_ENABLED": "0", "GOWORK": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"go could not build {target.name} in {folder}:\n{done.stdout[-4000:]}")
    unfinished.replace(target)


def main(names: list[str]) -> int:
    """Build what is asked for, or everything, saying what is done and where each program is."""

    def report(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        report(f"no such program: {', '.join(unknown)}; known are {', '.join(PROGRAMS)}")
        return 2
    try:
        for path in find_or_build(names or _OF_A_CLUSTER, report).values():
            report(str(path))
    except (MissingProgramError, BuildError) as problem:
        report(str(problem))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
