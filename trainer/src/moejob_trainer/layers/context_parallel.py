"""The whole row, gathered from the chunks of context ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moejob_trainer.distributed.collectives import all_gather
from moejob_trainer.distributed.groups import Group
from moejob_trainer.layers.documents import restore_row_order


def gather_row(local_chunks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the whole row from the chunks of all context ranks. [t, ...] -> [t * context_size, ...]

    In the backward pass, every rank receives the sum of all ranks' gradients for its tokens.
    """
    return restore_row_order(all_gather(local_chunks, Group(group.rank(), group.size(), group)), group.size())
