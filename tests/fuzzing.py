"""Inputs that strangers may send: as many as `make test` has time for, or as MOEJOB_FUZZ_INPUTS says."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

INPUTS = "MOEJOB_FUZZ_INPUTS"
_USUAL = 10_000
_WRONG = (
    b"",
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\x1b[2J",
    b"-1",
    b"1e999",
    b"9" * 400,
    b"NaN",
    b"null",
    b"{}",
    b'"',
    b"[" * 300,
)


def drawn() -> Iterator[random.Random]:
    """Sources of chance, the same each time unless another number of inputs was asked for."""
    asked = os.environ.get(INPUTS)
    # A longer search that began where the usual one does would see nothing else for its first seconds.
    first = 0 if asked is None else random.randrange(2**62)
    for number in range(_USUAL if asked is None else int(asked)):
        yield random.Random(first + number)


def damaged(draw: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of the samples with a few places changed, each to what a parser may not expect."""
    content = draw.choice(samples)
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(content) + 1)
        end = min(len(content), start + draw.choice((0, 1, 4, 40)))
        put = draw.choice((*_WRONG, draw.randbytes(2), content[end : end + 20]))
        content = content[:start] + put + content[end:]
    return content
