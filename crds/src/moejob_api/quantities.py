"""Kubernetes quantities as bytes, and bytes as people read them."""

from __future__ import annotations

from decimal import Decimal

GIB = 2**30

# Longest suffix first: "Mi" must not be read as "M".
_FACTORS = {
    **{f"{letter}i": 1024 ** (power + 1) for power, letter in enumerate("KMGTPE")},
    "k": 1000,
    **{letter: 1000 ** (power + 2) for power, letter in enumerate("MGTPE")},
}


def quantity_bytes(quantity: int | str) -> int:
    """The bytes of a quantity such as 16Gi."""
    if isinstance(quantity, int):
        return quantity
    for suffix, factor in _FACTORS.items():
        if quantity.endswith(suffix):
            return int(Decimal(quantity.removesuffix(suffix)) * factor)
    if quantity.endswith("m"):
        return int(Decimal(quantity.removesuffix("m")) / 1000)
    return int(Decimal(quantity))


def readable_bytes(size_bytes: float) -> str:
    """Bytes as GiB with one decimal, the unit in which GPUs are sold; TiB for what does not fit on one."""
    if size_bytes >= 4096 * GIB:
        return f"{size_bytes / (1024 * GIB):.1f} TiB"
    if size_bytes >= 0.1 * GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{size_bytes / 2**20:.1f} MiB"
