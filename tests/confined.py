"""Owns how tests run an image without a container engine: as its user, on a root that is read-only, as process 1.

What the kubelet would mount is mounted and nothing else; the network is the machine's. Needs root and buildah.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builds import layouts
from image_builds.commands import Store, buildah

# In namespaces of its own, so that every mount goes with it. Device files are the machine's.
_SCRIPT = """
set -eu
root=$({mount})
cd {view}
mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$root/etc" {inside}
touch "$root/etc/hosts"
mount --rbind "$root" .
mount -o remount,bind,ro .
cd {view}
mount -t proc proc proc
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom; do touch dev/$device; mount --bind /dev/$device dev/$device; done
mkdir dev/shm
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=1777 tmpfs tmp
mount --bind {hosts} etc/hosts
touch dev/termination-log
mount --bind {last_word} dev/termination-log
{volumes}
exec env -i {environment} {setpriv} --no-new-privs {chroot} --userspec={user} --groups={group} . {command}
"""


@dataclass(frozen=True)
class Container:
    """A container as a pod's manifest has it; folders of this machine by the path at which they are mounted."""

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Path] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConfinedContainer:
    """A container that can be started."""

    words: list[str]
    last_word: Path

    def run(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(self.words, capture_output=True, text=True, timeout=seconds, check=False)


@contextmanager
def confine_container(layout: Path, store: Store, container: Container, folder: Path) -> Iterator[ConfinedContainer]:
    """A container of an image, ready to be started; `folder` is for what it needs on this machine."""
    image = layouts.image(layout)
    made = _run_command(buildah(store, "from", "--isolation=chroot", "--pull-never", image.name))
    view, hosts, last_word = folder / "view", folder / "hosts", folder / "termination-log"
    view.mkdir()
    hosts.write_text("".join(f"127.0.0.1 {name}\n" for name in ("localhost", *container.hosts)))
    last_word.touch()
    last_word.chmod(0o666)
    try:
        script = _script(image.config["config"], container, buildah(store, "mount", made), view)
        yield ConfinedContainer(_namespaces(script), last_word)
    finally:
        _run_command(buildah(store, "rm", made))


def _script(config: Mapping[str, Any], container: Container, mount: list[str], view: Path) -> str:
    environment = [*config["Env"], *(f"{name}={value}" for name, value in container.environment.items())]
    command = container.command or tuple(config["Entrypoint"])
    volumes = (f"mount --bind {folder} .{path}" for path, folder in container.volumes.items())
    return _SCRIPT.format(
        mount=shlex.join(mount),
        view=view,
        inside=" ".join(f'"$root{path}"' for path in container.volumes),
        hosts=view.with_name("hosts"),
        last_word=view.with_name("termination-log"),
        volumes="\n".join(volumes),
        user=config["User"],
        group=config["User"].partition(":")[2],
        environment=shlex.join(environment),
        setpriv=shutil.which("setpriv"),
        chroot=shutil.which("chroot"),
        command=shlex.join(command),
    )


def _namespaces(script: str) -> list[str]:
    own = ["--mount", "--pid", "--fork", "--kill-child=KILL", "--propagation", "private"]
    return ["unshare", *own, "sh", "-c", script]


def _run_command(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
