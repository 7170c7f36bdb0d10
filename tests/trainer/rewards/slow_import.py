"""Takes longer to import than a batch may take."""

import threading

threading.Event().wait(3)


def f(completions: list[str], **_: object) -> list[float]:
    """Return 1 for each."""
    return [1.0] * len(completions)
