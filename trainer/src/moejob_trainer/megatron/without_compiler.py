"""The first import of Megatron, without the compiler of torch.

Megatron decorates functions with torch.compile, for layers that no rank uses here. The decorator imports torch's
compiler, a fifth of the time in which a launcher starts.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def import_megatron() -> None:
    """Import Megatron. Later imports find its modules in sys.modules."""
    # Apex and Transformer Engine are never used here, at later imports either. Other warnings of Megatron stay.
    warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning)
    warnings.filterwarnings("ignore", r"absl\.logging is not installed", UserWarning)
    # Python says of some of Megatron's docstrings, as it compiles them, that they are no raw strings.
    warnings.filterwarnings("ignore", "invalid escape sequence", SyntaxWarning)
    # It warns at every start that it plans the layout of gradient buffers itself, which is what we want.
    logging.getLogger("megatron.core.distributed.distributed_data_parallel").setLevel(logging.ERROR)
    with _without_compile(), _hide_package("wandb"):
        import megatron.core  # noqa: F401, PLC0415


@contextmanager
def _without_compile() -> Iterator[None]:
    torch_compile = torch.compile

    def keep_uncompiled(function: Compiled) -> Compiled:
        return function

    torch.compile = keep_uncompiled  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = torch_compile


@contextmanager
def _hide_package(name: str) -> Iterator[None]:
    """Make the import of a package fail meanwhile, unless it is imported already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
