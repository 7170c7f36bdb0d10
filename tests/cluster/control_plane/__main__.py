"""A control plane to try things on by hand: `PYTHONPATH=tests python -m cluster.control_plane FOLDER [NODES]`."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.binaries import find_or_build
from cluster.by_hand import say, stay
from cluster.control_plane.plane import PROGRAMS, control_plane


def main(folder: Path, nodes: int) -> None:
    """Start it in an empty folder, and stay."""
    programs = find_or_build(PROGRAMS, say)
    stay(folder, lambda at: control_plane(at, programs, nodes), lambda plane: plane.kubeconfig)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
