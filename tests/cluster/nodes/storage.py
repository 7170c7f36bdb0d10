"""Volumes that every node sees: folders of the machine, or file systems that are as small as their claim says.

It does what a storage provider does in a cluster: it answers claims with volumes and takes back what is released.
"""

from __future__ import annotations

import http.client
import re
import shutil
import threading
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from cluster.control_plane.api import Api, RefusedError
from cluster.nodes.linux_namespaces import run_command
from cluster.nodes.node import Node

CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
CLAIMS = "/api/v1/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
PROVISIONER = "moejob.dev/nodes"
POLL_SECONDS = 0.2
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class StorageClass(StrEnum):
    """The storage classes."""

    # A folder, the default: as large as the machine's disk, whatever the claim says.
    SHARED = "shared"
    # A file system of the claim's size, which can be filled.
    SIZED = "sized"


class Storage:
    """Answers claims until it is stopped."""

    def __init__(self, api: Api, nodes: Sequence[Node], folder: Path) -> None:
        self._api = api
        self._nodes = nodes
        self._folder = folder
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._answer_claims, name="storage")

    def start(self) -> None:
        """Announce the classes and begin."""
        self._folder.mkdir()
        for name in StorageClass:
            self._api.create(CLASSES, _storage_class(name))
        self._thread.start()

    def stop(self) -> None:
        """Answer no more. What is mounted ends with the nodes."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def volume_path(self, namespace: str, claim: str) -> Path:
        """Return where the machine sees what is in a claim's volume."""
        return self._nodes[0].host_path(self.shared_folder(namespace, claim))

    def shared_folder(self, namespace: str, claim: str) -> Path:
        """Return the folder of this machine that a claim of class SHARED is: files can be linked into it."""
        found = self._api.get(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}")
        return self._folder / str(found["spec"]["volumeName"])

    def _answer_claims(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            try:
                self._answer_each()
            except (RefusedError, OSError, http.client.HTTPException):
                # The API server is away: tests do that to it.
                continue

    def _answer_each(self) -> None:
        volumes = self._api.get(VOLUMES)["items"]
        known = {volume["metadata"]["name"] for volume in volumes}
        for claim in self._api.get(CLAIMS)["items"]:
            if claim["spec"].get("storageClassName") in set(StorageClass) and _volume_name(claim) not in known:
                self._create_volume(claim)
        for volume in volumes:
            if volume["status"].get("phase") == "Released" and volume["spec"]["storageClassName"] in set(StorageClass):
                self._remove_volume(volume)

    def _create_volume(self, claim: dict[str, Any]) -> None:
        path = self._folder / _volume_name(claim)
        path.mkdir(exist_ok=True)
        if claim["spec"]["storageClassName"] == StorageClass.SIZED:
            self._mount_volume(path, _parse_quantity(claim["spec"]["resources"]["requests"]["storage"]))
        # The users of pods are no users of this machine.
        self._nodes[0].host_path(path).chmod(0o777)
        self._api.create(VOLUMES, _build_volume(claim, path))

    def _mount_volume(self, path: Path, size: int) -> None:
        """Make a file system and mount it on every node: one kernel sees that it is the same, so it stays whole."""
        image = path.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(size)
        run_command("mkfs.ext4", "-q", "-m", "0", image)
        for node in self._nodes:
            node.namespaces.run("mount", "-o", "loop", image, path)

    def _remove_volume(self, volume: dict[str, Any]) -> None:
        path = Path(volume["spec"]["hostPath"]["path"])
        self._api.delete(f"{VOLUMES}/{volume['metadata']['name']}")
        image = path.with_suffix(".img")
        if image.exists():
            for node in self._nodes:
                node.namespaces.run("umount", path)
            image.unlink()
        shutil.rmtree(path)


def _storage_class(name: StorageClass) -> dict[str, Any]:
    is_default = {"storageclass.kubernetes.io/is-default-class": str(name is StorageClass.SHARED).lower()}
    return {"metadata": {"name": name, "annotations": is_default}, "provisioner": PROVISIONER}


def _volume_name(claim: dict[str, Any]) -> str:
    return f"claim-{claim['metadata']['uid']}"


def _build_volume(claim: dict[str, Any], path: Path) -> dict[str, Any]:
    metadata, spec = claim["metadata"], claim["spec"]
    return {
        "metadata": {"name": _volume_name(claim)},
        "spec": {
            "capacity": spec["resources"]["requests"],
            "accessModes": spec["accessModes"],
            "storageClassName": spec["storageClassName"],
            # Of folders in /tmp the controller manager takes itself for the provider, and would delete what is mounted.
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path), "type": "Directory"},
            "claimRef": {"namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]},
        },
    }


def _parse_quantity(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)([KMGT]i|)", quantity)
    if found is None:
        raise ValueError(f"a claim asks for {quantity!r}; the storage of tests knows whole numbers of {list(UNITS)}")
    return int(found[1]) * UNITS[found[2]]
