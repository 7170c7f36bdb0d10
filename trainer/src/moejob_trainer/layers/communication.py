"""A row that context ranks hold in chunks, put together."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from moejob_trainer.groups import Group, gathered
from moejob_trainer.layers.documents import in_row_order


def gathered_row(held: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole row, of which each rank of the context group holds its chunks. [t, ...] -> [t * context_size, ...]

    Backward, every rank receives the sum of what all ranks say about its tokens.
    """
    return in_row_order(gathered(held, Group(group.rank(), group.size(), group)), group.size())
