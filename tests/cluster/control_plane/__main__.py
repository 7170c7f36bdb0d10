"""A control plane to try things on by hand: `PYTHONPATH=tests python -m cluster.control_plane FOLDER [NODES]`."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from pathlib import Path

from cluster.binaries import found_or_built
from cluster.control_plane.plane import PROGRAMS, control_plane


def main(folder: Path, nodes: int) -> None:
    """Start it in an empty folder, say how to reach it, and end it with ctrl-C or SIGTERM."""
    programs = found_or_built(PROGRAMS, _say)
    folder.mkdir(parents=True, exist_ok=True)
    # Not what SIGINT does now: a shell that starts us in the background has it ignored.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), control_plane(folder.resolve(), programs, nodes) as plane:
        _say(f"export KUBECONFIG={plane.kubeconfig}")
        signal.pause()


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
