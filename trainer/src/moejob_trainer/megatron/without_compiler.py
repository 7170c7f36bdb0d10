"""The first import of Megatron, without the compiler of torch.

Megatron compiles functions where it defines them, for layers that no rank uses here. Torch imports its compiler as soon
as a function is to be compiled, which takes a fifth of the time in which a launcher starts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def import_megatron() -> None:
    """Import Megatron. Later imports find what this one has left."""
    # Of packages that our layers and updates never use, at later imports too. Megatron's other warnings are shown.
    warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning)
    with _nothing_compiled(), _absent("wandb"):
        import megatron.core  # noqa: F401, PLC0415


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    compiling = torch.compile

    def plain(function: Compiled) -> Compiled:
        return function

    torch.compile = plain  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiling


@contextmanager
def _absent(name: str) -> Iterator[None]:
    """Let a package that is looked for on the way not be found, unless it is there already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
