"""Makes the two bases of images from Debian's packages, where no registry of images can be reached.

They are what the Dockerfiles name: Debian 13 with its Python 3.13, whole for trainers, and for the operator without a
shell, a package manager or anything else that it does not run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from image_builds.recipes import TIMESTAMP

SUITE = "trixie"
# What people read; copyrights stay. Lists of packages go out of date and are fetched again by those who install more.
_LEFT_OUT = (
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    "--dpkgopt=path-include=/usr/share/doc/*/copyright",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/info/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--customize-hook=rm -rf $1/var/lib/apt/lists/* $1/var/cache/apt/* $1/var/log/*",
)
# As in distroless images: dpkg knows nothing of packages that were only unpacked.
_NAME_THEM = (
    "mkdir -p $1/var/lib/dpkg/status.d && cd $1/var/cache/apt/archives && for deb in *.deb; do "
    "dpkg-deb --field $deb >../../../lib/dpkg/status.d/${deb%%_*} || exit 1; done"
)


class MissingToolError(Exception):
    """This machine lacks a program."""


@dataclass(frozen=True, slots=True)
class Base:
    """One base: which of Debian's packages, and whether their own scripts run."""

    name: str
    variant: str
    packages: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """Return the options of mmdebstrap."""
        named = (f"--extract-hook={_NAME_THEM}",) if self.variant == "extract" else ()
        return (f"--variant={self.variant}", f"--include={','.join(self.packages)}", *_LEFT_OUT, *named)

    @property
    def reference(self) -> str:
        """Its name in a store; the tag says what it is made of."""
        return f"localhost/moejob-{self.name}:{SUITE}-{hashlib.sha256(repr(self.options).encode()).hexdigest()[:12]}"


# libstdc++ is there as apt's; torch needs it.
BASE = Base("base", "minbase", ("ca-certificates", "python3.13"))
# base-files has the links by which programs find their loader: /lib64 is one to usr/lib64.
RUNTIME = Base("runtime", "extract", ("base-files", "python3.13"))


def archive(base: Base, folder: Path) -> Path:
    """The root file system as a tar archive, made when it is not there yet."""
    made = folder / f"{base.reference.rpartition('/')[2].replace(':', '-')}.tar"
    if made.exists():
        return made
    if shutil.which("mmdebstrap") is None:
        raise MissingToolError(
            f"a base image from {SUITE}'s packages needs mmdebstrap (apt-get install mmdebstrap); "
            "or name one that this machine can pull: make images BASE=... RUNTIME=..."
        )
    unfinished = made.with_name(f".{made.name}")
    subprocess.run(
        ["mmdebstrap", "--quiet", *base.options, SUITE, unfinished],
        env=os.environ | {"SOURCE_DATE_EPOCH": str(TIMESTAMP)},
        check=True,
    )
    unfinished.replace(made)
    return made
