"""Inputs that strangers may send: as many as `make test` has time for, or as MOEJOB_FUZZ_INPUTS says.

Whatever is done with them takes little memory, the worst moment included: an operator at rest has 92 MiB of the 150
that it may have.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INPUTS = "MOEJOB_FUZZ_INPUTS"
GROWTH_MIB = 50
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


def random_sources() -> Iterator[random.Random]:
    """Sources of chance, the same each time unless another number of inputs was asked for.

    After the last one it fails when the process took more memory meanwhile than is left to an operator.
    """
    asked = os.environ.get(INPUTS)
    # A longer search that began where the usual one does would see nothing else for its first seconds.
    first = 0 if asked is None else random.randrange(2**62)
    with _little_memory():
        for number in range(_USUAL if asked is None else int(asked)):
            yield random.Random(first + number)


@contextmanager
def _little_memory() -> Iterator[None]:
    # 5: the most that was resident becomes what is now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _mib("VmRSS")
    yield
    grown = _mib("VmHWM") - before
    assert grown < GROWTH_MIB, f"{grown:.0f} MiB more were resident at the worst moment"


def _mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def damage_sample(draw: random.Random, samples: Sequence[bytes]) -> bytes:
    """One of the samples with a few places changed, each to what a parser may not expect."""
    content = draw.choice(samples)
    for _ in range(draw.randrange(1, 4)):
        start = draw.randrange(len(content) + 1)
        end = min(len(content), start + draw.choice((0, 1, 4, 40)))
        put = draw.choice((*_WRONG, draw.randbytes(2), content[end : end + 20]))
        content = content[:start] + put + content[end:]
    return content
