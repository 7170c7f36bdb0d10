"""containerd on a node: its settings, the images it keeps between runs, its start and end; knows no kubelet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.nodes.linux_namespaces import LinuxNamespaces, NamespaceError
from cluster.processes import Process

SOCKET = "/run/containerd/containerd.sock"
PAUSE_IMAGE = "moejob.test/pause:1"
NAMESPACE = ("--namespace", "k8s.io")

# The layers of an image go as soon as they are unpacked: they are in the registry anyway.
# Without restrict_oom_score_adj runc fails where we may not lower it: "can't get final child's PID from pipe: EOF".
SETTINGS = """\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [{disabled}]

[grpc]
  address = "{socket}"

[plugins."io.containerd.cri.v1.images"]
  discard_unpacked_layers = true
  use_local_image_pull = true
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{pause}"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "{registries}"

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = [{cni_programs}]
    conf_dir = "{cni_settings}"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""
CRI = '"io.containerd.grpc.v1.cri"'
REGISTRY = """\
server = "{url}"
[host."{url}"]
  capabilities = ["pull", "resolve"]
"""


@dataclass(frozen=True, slots=True)
class ProgramFolders:
    """The folders of programs that containerd does not bring along."""

    folder: Path
    cni_programs: tuple[Path, ...]
    cni_settings: Path
    registry: str


class Runtime:
    """containerd of one node."""

    def __init__(
        self, node: LinuxNamespaces, places: ProgramFolders, programs: Mapping[str, Path], words: Iterable[str | Path]
    ) -> None:
        self._node = node
        self._ctr = programs["ctr"]
        self._containerd: tuple[str | Path, ...] = (*words, programs["containerd"], "--config")
        self._places = places
        self.process: Process | None = None

    def start(self) -> None:
        """Run it with the images of earlier runs, and nothing else of them."""
        self._write_registries()
        self._bury_containers()
        self.process = self._started("containerd", disabled="")

    def stop(self) -> None:
        """End it as a crash would; what it runs continues."""
        if self.process is not None:
            self.process.stop()

    def pull_image(self, image: str) -> None:
        """Have an image before a pod asks for it."""
        self._ask("images", "pull", "--hosts-dir", str(self._registries), image)
        self._ask("content", "prune", "references")

    def list_images(self) -> set[str]:
        """The names of all images."""
        return set(self._ask("images", "ls", "--quiet").split())

    def remove_images(self, images: Iterable[str]) -> None:
        """Remove images, and all layers that no other has."""
        names = sorted(images)
        if names:
            self._ask("images", "rm", "--sync", *names)

    @property
    def _registries(self) -> Path:
        return self._places.folder / "registries"

    def _bury_containers(self) -> None:
        """Those of an earlier run: their processes have ended, the kubelet would look after them for a minute."""
        alone = self._started("containerd-alone", disabled=CRI)
        for container in self._ask("containers", "ls", "--quiet").split():
            self._ask("containers", "rm", container)
        alone.stop()

    def _started(self, name: str, disabled: str) -> Process:
        settings = self._places.folder / f"{name}.toml"
        programs = ", ".join(f'"{folder}"' for folder in self._places.cni_programs)
        settings.write_text(
            SETTINGS.format(
                disabled=disabled,
                socket=SOCKET,
                pause=PAUSE_IMAGE,
                registries=self._registries,
                cni_programs=programs,
                cni_settings=self._places.cni_settings,
            )
        )
        process = Process(name, self._node.wrap_command(*self._containerd, settings), self._places.folder)
        process.start()
        process.wait_until(self._answers)
        return process

    def _write_registries(self) -> None:
        folder = self._registries / "_default"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts.toml").write_text(REGISTRY.format(url=self._places.registry))

    def _answers(self) -> bool:
        try:
            return bool(self._ask("version"))
        except NamespaceError:
            return False

    def _ask(self, *words: str) -> str:
        return self._node.run(self._ctr, "--address", SOCKET, *NAMESPACE, *words)
