"""make audit-images takes the list of parts out of each image, and fails when one has a part that is to be replaced."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from image_builds.recipes import ROOT

DOCKER = """#!/bin/sh
echo "docker $*" >>"$LOG"
case $1 in
inspect) echo /opt/moejob/sbom.cdx.json ;;
create) echo container ;;
cp) echo '{"components": []}' >"$3" ;;
esac
"""
GRYPE = '#!/bin/sh\necho "grype $2 $3 $4" >>"$LOG"\ntest -s "${1#sbom:}" && exit %d\n'


@pytest.mark.parametrize(
    ("found", "code"), [pytest.param(0, 0, id="nothing to replace"), pytest.param(1, 1, id="a part to replace")]
)
def test_every_image_is_looked_up(tmp_path: Path, found: int, code: int) -> None:
    ended, log = audited(tmp_path, {"docker": DOCKER, "grype": GRYPE % found})
    assert ended.returncode == code
    assert [line for line in log if line.startswith(("docker create", "grype"))] == [
        "docker create example.com/moejob-operator:1",
        "grype --only-fixed --fail-on medium",
        "docker create example.com/moejob-trainer:1",
        "grype --only-fixed --fail-on medium",
    ]


def test_an_image_that_is_not_there_is_no_image_without_vulnerabilities(tmp_path: Path) -> None:
    ended, log = audited(tmp_path, {"docker": "#!/bin/sh\nexit 1\n", "grype": GRYPE % 0})
    assert (ended.returncode, log) == (1, [])


def test_without_grype_it_says_so(tmp_path: Path) -> None:
    ended, _ = audited(tmp_path, {"docker": DOCKER})
    assert (ended.returncode, "grype is not installed" in ended.stderr) == (2, True)


def audited(folder: Path, programs: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The end of an audit of two images with these programs, and the calls of them."""
    for name, content in programs.items():
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    log = folder / "log"
    log.touch()
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "LOG": str(log), "PREFIX": "example.com", "TAG": "1"}
    command = [str(ROOT / "scripts/audit-images"), "operator", "trainer"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    return ended, log.read_text().splitlines()
