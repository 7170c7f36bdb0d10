"""Named ranges of a step, for torch.profiler and, on GPUs, as NVTX ranges for nsys. They cost microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.profiler import record_function


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Name a range in traces."""
    has_gpu = torch.cuda.is_initialized()
    with record_function(name):
        if has_gpu:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if has_gpu:
                torch.cuda.nvtx.range_pop()
