"""Messages about text that is no YAML, with what to do about it. Knows nothing of jobs."""

from __future__ import annotations

from collections.abc import Mapping

import yaml
from yaml.reader import ReaderError


class UnreadableError(ValueError):
    """Text that cannot be read: why, on which line, and at which field where one is known."""

    def __init__(self, reason: str, line: int | None = None, path: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.line = line
        self.path = path


# What the parser says, and what that means to the author of a file.
_REASONS: Mapping[str, str] = {
    "mapping values are not allowed in this context": "a second ': ' on the line, or a line indented further than the "
    "one above it allows; put the text in quotes or align the line with its neighbours",
    "did not find expected key": "the line does not continue the mapping it is in; align it with the lines above",
    "did not find expected '-' indicator": "the line does not continue the list it is in; begin it with '- ' or "
    "indent it differently",
    "did not find expected ',' or ']'": "a [ is not closed; add ] or a comma",
    "did not find expected ',' or '}'": "a { is not closed; add } or a comma",
    "did not find expected node content": "a value is missing, or a bracket is closed that was never opened",
    "did not find expected <document start>": "a line apart from all above it; indent it as the first line",
    "could not find expected ':'": "a field without ': ' behind its name; add it, or put the text in quotes",
    "found unexpected end of stream": "a quote is opened and never closed",
    "found unknown escape character": 'an unknown \\ in "..."; write \\\\ or use single quotes',
    "found undefined tag handle": "an unknown tag; remove what begins with !",
    "found incompatible YAML document": "kubectl takes no lines that begin with %; remove them",
    "found a tab character where an indentation space is expected": "a tab indents the line; use spaces",
    "found a tab character that violates indentation": "a tab indents the line; use spaces",
}


def explain_yaml_error(error: yaml.YAMLError, text: str) -> UnreadableError:
    """A parser's error in words of ours."""
    if isinstance(error, ReaderError):
        return UnreadableError("holds a control character, so it is not YAML text; remove the character")
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return UnreadableError(f"not YAML: {error}")
    mark = error.problem_mark
    if error.context_mark is not None and error.problem == "found unexpected end of stream":
        # Where the quote was opened helps more than where the file ended.
        mark = error.context_mark
    line = mark.line + 1
    if error.problem == "found character that cannot start any token":
        return UnreadableError(_bad_start_reason(text, mark.line, mark.column), line)
    problem = error.problem or "not YAML"
    return UnreadableError(_REASONS.get(problem, f"not YAML: {problem}"), line)


def _bad_start_reason(text: str, line: int, column: int) -> str:
    lines = text.splitlines()
    character = lines[line][column : column + 1] if line < len(lines) else ""
    if character == "\t":
        return "a tab indents the line; use spaces"
    return f"text cannot begin with {character or 'this character'}; put it in quotes"
