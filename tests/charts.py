"""Owns how tests call Helm, and what it makes of the chart."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent.parent / "charts" / "moejob"
NAMESPACE = "moejob-system"
# What keeps the name in Helm's own words.
RELEASE = "moejob"
# Longer than Helm waits.
SECONDS = 300

Values = Mapping[str, Any]
Object = dict[str, Any]


class HelmError(Exception):
    """Helm failed; its words are the message."""


@dataclass(frozen=True)
class RenderedChart:
    """The objects of a release."""

    objects: tuple[Object, ...]

    def find_all(self, kind: str) -> list[Object]:
        """All of a kind."""
        return [found for found in self.objects if found["kind"] == kind]

    def find_one(self, kind: str, name: str | None = None) -> Object:
        """The only one of a kind, or of that name."""
        [found] = [found for found in self.find_all(kind) if name in (None, found["metadata"]["name"])]
        return found

    @property
    def pod(self) -> Object:
        """The template of the operator's pods."""
        template: Object = self.find_one("Deployment")["spec"]["template"]
        return template

    @property
    def container(self) -> Object:
        """The operator's container."""
        [container] = self.pod["spec"]["containers"]
        found: Object = container
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the operator's container."""
        return {variable["name"]: variable["value"] for variable in self.container["env"]}


@dataclass(frozen=True)
class Helm:
    """Helm as if never used here: settings, plugins and caches are in a folder of its own."""

    program: Path
    folder: Path

    def run(self, *arguments: str | Path, values: Values | None = None) -> str:
        """Return what Helm prints."""
        given = [] if values is None else ["--values=-"]
        homes = {f"HELM_{name}_HOME": str(self.folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HELM_", "KUBE"))}
        done = subprocess.run(
            [self.program, *arguments, *given],
            input=None if values is None else json.dumps(values),
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
            env=kept | homes,
        )
        if done.returncode:
            raise HelmError(done.stderr)
        return done.stdout

    def render(self, values: Values | None = None, namespace: str = NAMESPACE) -> RenderedChart:
        """Return what an installation with these values would create, without asking any cluster."""
        text = self.run("template", RELEASE, CHART, f"--namespace={namespace}", values=values or {})
        return RenderedChart(tuple(found for found in yaml.load_all(text, yaml.CSafeLoader) if found))
