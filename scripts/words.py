"""Check of docstrings, comments and pages against a word list, of names that say nothing, and of commit subjects.

The list and the files it holds for are data: words.toml. Strings are left alone: tests hold what a program prints.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LONGEST_SUBJECT = 72
_LIST = Path(__file__).with_suffix(".toml")
# Code in a page is not prose, nor is a table that is made of results.
_CODE = re.compile(r"```.*?```|`[^`\n]*`|<!-- measured: start -->.*?<!-- measured: end -->", re.DOTALL)
# The part of the tree that a commit is about, or several.
_PART = re.compile(r"(?:fixup! )?[a-z][a-z0-9_, /-]*: \S")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Words:
    """The words to avoid, with those to write instead, and the words that no docstring begins with."""

    instead: Mapping[str, str]
    questions: Sequence[str]

    def problems(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the line, counted from 0, and the problem of each word to avoid."""
        pattern = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in self.instead)
        for match in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            word = " ".join(match.group().lower().split())
            yield text.count("\n", 0, match.start()), f"{word!r}: write {self.instead[word]}"

    def begins_with_question(self, docstring: str) -> bool:
        """Return whether the first word of a docstring asks something."""
        return docstring.partition(" ")[0] in self.questions


def python_problems(text: str, words: Words) -> Iterator[tuple[int, str]]:
    """Yield line and problem of each docstring and comment of a module."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, _DOCUMENTED) or (docstring := ast.get_docstring(node, clean=False)) is None:
            continue
        line = node.body[0].lineno
        if words.begins_with_question(docstring):
            yield (
                line,
                f"the docstring begins with {docstring.partition(' ')[0]!r}: write a noun phrase or an imperative",
            )
        yield from ((line + offset, problem) for offset, problem in words.problems(docstring))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from ((token.start[0], problem) for _, problem in words.problems(token.string))


def page_problems(text: str, words: Words) -> Iterator[tuple[int, str]]:
    """Yield line and problem of a page, without its code."""
    prose = _CODE.sub(lambda code: "\n" * code.group().count("\n"), text)
    return ((line + 1, problem) for line, problem in words.problems(prose))


def file_problems(path: Path, words: Words) -> list[str]:
    """Return the problems of one file, in the order of its lines."""
    read = python_problems if path.suffix == ".py" else page_problems
    return [f"{path}:{line}: {problem}" for line, problem in sorted(read(path.read_text(encoding="utf-8"), words))]


def identifier_problems(text: str, functions: Collection[str], values: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield line and problem of each function that is a bare participle, and of each value whose name says nothing.

    A participle says what has become of a thing, not of which: grep for `kept` once found thirty ideas.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name.strip("_")
            if name in functions or (name.endswith("ed") and "_" not in name):
                yield node.lineno, f"function {node.name}: name it with a verb and its object, or with a noun phrase"
        elif isinstance(node, ast.arg) and node.arg.strip("_") in values:
            yield node.lineno, f"parameter {node.arg}: say what it holds"
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id.strip("_") in values:
            yield node.lineno, f"{node.id}: say what it holds"


def class_problems(paths: Sequence[Path]) -> list[str]:
    """Return the classes of the packages that share a name: a name that is searched for leads to one place."""
    places: dict[str, list[str]] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    return [
        f"{', '.join(found)}: {len(found)} classes are called {name}: rename all but one"
        for name, found in places.items()
        if len(found) > 1
    ]


def subject_problems(subjects: Sequence[str]) -> list[str]:
    """Return the problems of commit subjects."""
    too_long = [
        f"commit subject of {len(subject)} characters, at most {LONGEST_SUBJECT}: {subject}"
        for subject in subjects
        if len(subject) > LONGEST_SUBJECT
    ]
    without_part = [
        f"commit subject without its part, as in 'grpo: count answers once': {subject}"
        for subject in subjects
        if not _PART.match(subject)
    ]
    return too_long + without_part


def branch_subjects(base: str = "main") -> list[str]:
    """Return the subjects of the branch's commits; none where the base is not known, as in a shallow clone."""
    command = ["git", "log", "--format=%s", "--no-merges", f"{base}..HEAD"]
    log = subprocess.run(command, capture_output=True, text=True, check=False)
    return log.stdout.splitlines() if log.returncode == 0 else []


def files(roots: Sequence[str]) -> Iterator[Path]:
    """Yield the modules and pages below each root."""
    for root in map(Path, roots):
        yield from [root] if root.is_file() else sorted([*root.rglob("*.py"), *root.rglob("*.md")])


def main() -> int:
    """Print every problem; 1 when there is one."""
    listed = tomllib.loads(_LIST.read_text(encoding="utf-8"))
    words = Words(listed["words"], listed["questions"])
    checked = list(files(listed["checked"]))
    problems = [problem for path in checked for problem in file_problems(path, words)]
    modules = [path for path in checked if "src" in path.parts and path.suffix == ".py"]
    programs = [path for path in checked if path.parts[0] in ("benchmarks", "scripts") and path.suffix == ".py"]
    names = listed["identifiers"]
    problems += [
        f"{path}:{line}: {problem}"
        for paths, values in ((modules, names["values"]), (programs, ()))
        for path in paths
        for line, problem in identifier_problems(path.read_text(encoding="utf-8"), names["functions"], values)
    ]
    problems += class_problems(modules)
    problems += subject_problems(branch_subjects())
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
