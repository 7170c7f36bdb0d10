"""Texts of pods, as a terminal may show them."""

from __future__ import annotations

import unicodedata


def printable_text(text: str) -> str:
    """Return the text with a space for each character that a terminal obeys instead of showing it.

    Terminals obey control characters, format characters (which can turn the direction of writing), surrogates, and line
    and paragraph separators. A pod's words reach status, Events, logs and terminals.
    """
    return text if text.isprintable() else "".join(" " if _is_control_character(letter) else letter for letter in text)


def escaped_text(text: str) -> str:
    """Return the text with each character that `printable_text` replaces written as Python does: \\x9b, \\u202e."""
    if text.isprintable():
        return text
    return "".join(
        letter.encode("unicode_escape").decode() if _is_control_character(letter) else letter for letter in text
    )


def escaped_lines(text: str) -> str:
    """Return the text with its lines and tabs as they are, and everything else escaped."""
    return "\n".join("\t".join(map(escaped_text, line.split("\t"))) for line in text.split("\n"))


def _is_control_character(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")
