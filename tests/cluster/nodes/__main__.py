"""A cluster to try things on by hand: `PYTHONPATH=tests python -m cluster.nodes FOLDER [--spare]`."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

from cluster.nodes.cluster import SPARE, Settings, cluster, found_programs


def main(folder: Path, settings: Settings) -> None:
    """Start it in an empty folder, say how to reach it, and end it with ctrl-C or SIGTERM."""
    programs = found_programs(_say)
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), cluster(folder.resolve(), programs, settings) as running:
        _say(f"export KUBECONFIG={running.plane.kubeconfig}")
        signal.pause()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), SPARE if "--spare" in sys.argv else Settings())
