"""Checksums of tensors received by a worker, in the library that reads their memory fastest.

Twin of moejob_trainer.rollouts.transports.checksums: neither package imports the other, and moejob_api has no torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moejob_api.contract.weight_checksums import page_checksums


def tensor_checksums(tensor: Tensor) -> list[int]:
    """Return the checksum of each page of a received tensor's bytes."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    return page_checksums(data, torch) if data.is_cuda else page_checksums(data.numpy(), np)
