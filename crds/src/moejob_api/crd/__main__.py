"""Writes the API server's files to the folders of kubectl and Helm; with --check, only reports stale ones.

These are the CustomResourceDefinitions of jobs and of profiles, the policy with the rules of jobs, and for the chart's
policies of limits what each limit is about.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from moejob_api.crd.definition import crd_definition, profile_definition
from moejob_api.crd.policy import policy_with_binding
from moejob_api.documents.writing import yaml_text
from moejob_api.profiles.fields import ProfileKind
from moejob_api.rules.limits import limits_in_cel

# Helm reads no file outside of its chart, so each text stands in both folders.
FILES = (Path("crds/moetrainingjobs.yaml"), Path("charts/moejob/files/moetrainingjobs.yaml"))
_HEADER = "# Generated from the models in crds/src/moejob_api/job by `make generate`. Change those, not this file.\n"
RULES_FILES = (Path("crds/rules.yaml"), Path("charts/moejob/files/rules.yaml"))
_RULES_HEADER = "# Generated from crds/src/moejob_api/rules by `make generate`. Change those, not this file.\n"
PROFILE_FILES = (Path("crds/moetrainingprofiles.yaml"), Path("charts/moejob/files/moetrainingprofiles.yaml"))
_PROFILE_HEADER = "# Generated from crds/src/moejob_api/profiles by `make generate`. Change that, not this file.\n"
LIMITS_FILE = Path("charts/moejob/files/limits.yaml")
_LIMITS_HEADER = (
    "# Generated from crds/src/moejob_api/rules/limits.py by `make generate`. Change that, not this file.\n"
)
_SHOWN_LINES = 40


def crd_text() -> str:
    """The definition as it should be."""
    return _HEADER + yaml_text(crd_definition())


def profiles_text() -> str:
    """The definitions of both kinds of profiles as they should be."""
    return _PROFILE_HEADER + "---\n".join(yaml_text(profile_definition(kind)) for kind in ProfileKind)


def rules_text() -> str:
    """The policy of the rules and its binding as they should be."""
    return _RULES_HEADER + "---\n".join(map(yaml_text, policy_with_binding()))


def limits_text() -> str:
    """The file of the limits as it should be."""
    return _LIMITS_HEADER + yaml_text(limits_in_cel())


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files, or compare them; 1 when --check finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m moejob_api.crd", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository; default: the current folder")
    options = parser.parse_args(arguments)
    texts = {
        FILES: crd_text(),
        PROFILE_FILES: profiles_text(),
        RULES_FILES: rules_text(),
        (LIMITS_FILE,): limits_text(),
    }
    texts_by_path = {options.root / file: text for files, text in texts.items() for file in files}
    if options.check:
        stale = [path for path, text in texts_by_path.items() if _report_stale(path, text)]
        return 1 if stale else 0
    for path, text in texts_by_path.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


def _report_stale(path: Path, expected_text: str) -> bool:
    current_text = path.read_text(encoding="utf-8") if path.exists() else ""
    if current_text == expected_text:
        return False
    lines = difflib.unified_diff(
        current_text.splitlines(), expected_text.splitlines(), str(path), "make generate", lineterm="", n=1
    )
    for line in islice(lines, _SHOWN_LINES):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{path} is stale; run: make generate\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
