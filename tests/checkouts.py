"""Copies of this checkout, for tests that change what is in it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from image_builds.recipes import ROOT


def copy_checkout(to: Path) -> Path:
    """All files of this checkout that git knows or would add, in a new folder."""
    command = [shutil.which("git") or "git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to
