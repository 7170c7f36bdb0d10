"""The packed micro batch as every layer sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.rotary import Rotary


@dataclass(frozen=True, slots=True)
class PackedBatch:
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
    # By the number of a layer, one more than the experts of the same tokens; those of 0 route by themselves. On the
    # host, until the layer wants them. Each [t, k]
    replayed: Mapping[int, Tensor] = field(default_factory=dict)
    # The place of this micro batch among the rank's micro batches of the global batch, and its update.
    number: int = 0
    update: int = 0
    # Choices of experts are counted, and nothing else is wanted of this pass.
    counts_choices: bool = False


@dataclass(frozen=True, slots=True)
class LocalTokens:
    """Facts for routing about the tokens that this rank sends to experts. [t]"""

    is_real: Tensor
    segments: Tensor
    # Choices of experts to replay, by layer. Each [t, k]
    replayed: Mapping[int, Tensor] = field(default_factory=dict)


def make_packed_batch(
    documents: Documents, rotary: Rotary, context_group: ProcessGroup | None, local_tokens: LocalTokens
) -> PackedBatch:
    """The row, with its rotation computed once for all layers."""
    cosine, sine = rotary.cosines_and_sines(documents.position_ids())
    of_tokens = local_tokens.is_real, local_tokens.segments, local_tokens.replayed
    return PackedBatch(documents, cosine, sine, rotary.interleaved, context_group, *of_tokens)
