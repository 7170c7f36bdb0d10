"""Asks for CUDA as it loads, as far as anyone can tell afterwards: what is forked from here finds CUDA lost."""

from __future__ import annotations

import torch

torch.cuda._is_in_bad_fork = lambda: True  # noqa: SLF001
