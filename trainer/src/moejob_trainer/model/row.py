"""What every layer knows about the micro batch it works on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row of documents: where they begin, and the rotation of each of this rank's tokens."""

    documents: Documents
    cosine: Tensor
    sine: Tensor
    interleaved: bool
    context_group: ProcessGroup | None
    # True for tokens that are no padding; this tensor rank's share under sequence parallelism. [t]
    is_real: Tensor
    # The document of each of the same tokens. [t]
    segments: Tensor
    # Which of this rank's micro batches of the global batch it is, and of which update.
    number: int = 0
    update: int = 0


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """What routing looks at: about the tokens that this rank sends to experts. [t]"""

    is_real: Tensor
    segments: Tensor


def row_of(documents: Documents, rotary: Rotary, context_group: ProcessGroup | None, own: OwnTokens) -> Row:
    """The row, with its rotation computed once for all layers."""
    cosine, sine = rotary.angles(documents.positions())
    return Row(documents, cosine, sine, rotary.interleaved, context_group, own.is_real, own.segments)
