"""The same functions as faster kernels, each with a plain twin one folder up; only chosen for tensors on a GPU.

A module here imports Triton or a kernel package: it is loaded when the first tensor asks for it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from torch import Tensor

# The copy engine of a GPU moves rows that begin and end at multiples of it.
ALIGNMENT_BYTES = 16


def find_kernels(name: str, x: Tensor) -> ModuleType | None:
    """The module of this name, if `x` is where its kernels run."""
    return _load_kernels(name) if x.is_cuda else None


@cache
def _load_kernels(name: str) -> ModuleType | None:
    return import_module(f"{__name__}.{name}") if find_spec("triton") else None
