"""The fragments of `examples/networks` as jobs: planner, webhook and API server must take them within their limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# Limits of an installation that opens nothing which a fragment needs.
CLOSED: dict[str, Any] = {
    **{name: [] for name in ("images", "annotations", "networks", "hostPaths", "privileges")},
    "extendedResources": ["nvidia.com/gpu"],
}


@dataclass(frozen=True)
class NetworkFragment:
    """Sections to merge into a job, and the limits that the first lines of the file name."""

    name: str
    sections: dict[str, Any]
    limits: dict[str, Any]


def _read_fragment(file: Path) -> NetworkFragment:
    text = file.read_text()
    named = yaml.safe_load("\n".join(line[1:] for line in text.splitlines() if line.startswith("#   ")))
    sections = yaml.safe_load(text)
    sections["resources"] = {"cpu": "96", "memory": "1Ti", "gpuType": "H100"} | sections.get("resources", {})
    return NetworkFragment(file.stem, sections, CLOSED | named)


FRAGMENTS = [_read_fragment(file) for file in sorted((Path(__file__).parents[1] / "examples/networks").glob("*.yaml"))]
