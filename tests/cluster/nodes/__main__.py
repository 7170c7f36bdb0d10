"""A cluster to try things on by hand: `PYTHONPATH=tests python -m cluster.nodes FOLDER [--spare]`."""

from __future__ import annotations

import sys
from pathlib import Path

from cluster.by_hand import say, stay
from cluster.nodes.cluster import SPARE, Settings, find_programs, run_cluster


def main(folder: Path, settings: Settings) -> None:
    """Start it in an empty folder, and stay."""
    programs = find_programs(say)
    stay(folder, lambda at: run_cluster(at, programs, settings), lambda running: running.plane.kubeconfig)


if __name__ == "__main__":
    main(Path(sys.argv[1]), SPARE if "--spare" in sys.argv else Settings())
