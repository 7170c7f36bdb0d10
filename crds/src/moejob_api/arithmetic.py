"""Small whole-number arithmetic that several planners share."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt


def ceil_div(value: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-value // divisor)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return ceil_div(value, multiple) * multiple


# Bounded: a strange spec asks for sizes that no other ever has.
@lru_cache(maxsize=4096)
def divisors(value: int) -> tuple[int, ...]:
    """All divisors in ascending order."""
    small = [d for d in range(1, isqrt(value) + 1) if value % d == 0]
    return tuple(small + [value // d for d in reversed(small) if d * d != value])
