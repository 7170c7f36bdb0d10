"""Removal of secrets from lines that outlive their pod.

A rank prints what its libraries say, and some print the key that they could not log in with. A pod knows the values of
its own secrets: they are its environment. Keys of well-known forms are removed besides, for they may come from a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "[redacted]"
# The name of a variable that holds a secret has one of these words.
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH", re.IGNORECASE)
# Shorter values are words, and would be cut out of every sentence that has them.
_LEAST_CHARACTERS = 6
_SECRET_FORMS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)|(?<=Bearer )[A-Za-z0-9._~+/-]{8,}=*"
)


def is_secret_name(name: str) -> bool:
    """Return whether a variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None


class Redaction:
    """Replaces secrets of one environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        values = {value for name, value in environ.items() if is_secret_name(name)}
        # The longest first: a secret may begin with another.
        self._values = sorted((value for value in values if len(value) >= _LEAST_CHARACTERS), key=len, reverse=True)

    def redact_text(self, text: str) -> str:
        """Return the text without secrets."""
        for value in self._values:
            text = text.replace(value, REDACTED)
        return _SECRET_FORMS.sub(REDACTED, text)
