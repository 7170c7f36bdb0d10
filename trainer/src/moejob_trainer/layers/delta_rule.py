"""The gated delta rule: linear attention whose state is decayed, corrected and read at every token.

A head keeps a matrix S [dk, dv]. With the decay g <= 0 and the strength beta of a token:

    S <- exp(g) S,    S <- S + beta k (v - k S),    o = q S

Both the state and the convolution before it start from nothing at the first token of each document. Tokens are taken in
chunks: within one, all corrections are one triangular system; from chunk to chunk, only the state is carried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.documents import Documents
from moejob_trainer.layers.precision import at_least_float32

CHUNK_TOKENS = 64
# As flash-linear-attention and Transformers have it.
UNIT_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class DeltaInputs:
    """The inputs of one head for each of a row's tokens; queries and keys of fewer heads are shared by groups of heads.

    query, key [t, g, dk]; value [t, n, dv]; log_decay, strength [t, n], g a divisor of n
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor


def convolve_documents(x: Tensor, weight: Tensor, documents: Documents) -> Tensor:
    """Return for each channel the weighted sum of a token and those before it in its document, through SiLU.

    x [t, c], weight [c, width], whose last column is for the token itself -> [t, c]
    """
    if documents.context_size > 1:
        raise ValueError(f"a row cut over {documents.context_size} context ranks has no state carried along it")
    width = weight.shape[1]
    # Zeros before each document, and the documents behind one another: one convolution for the whole row.
    places = documents.row_indices() + (documents.segment_ids() + 1) * (width - 1)
    spaced = x.new_zeros(documents.row_tokens + len(documents.lengths) * (width - 1), x.shape[1])
    spaced = spaced.index_copy(0, places, x)
    sums = functional.conv1d(spaced.T[None], weight[:, None], groups=x.shape[1])[0].T
    return functional.silu(sums[places - (width - 1)])


def apply_delta_rule(inputs: DeltaInputs, documents: Documents) -> Tensor:
    """Return the output of each token, with queries and keys of length one and queries scaled by dk ** -0.5.

    [t, n, dv], in the type of the values
    """
    fused = find_linear_attention(inputs.value)
    if fused is not None:
        return _apply_fused(fused, inputs, documents)
    return plain_delta_rule(inputs, documents)


def plain_delta_rule(inputs: DeltaInputs, documents: Documents, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """`apply_delta_rule` in the operations of torch."""
    chunks = _Chunks.from_documents(documents, chunk_tokens)
    shared_by = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = (
        _scale_to_unit(at_least_float32(x)).repeat_interleave(shared_by, 1) for x in (inputs.query, inputs.key)
    )
    query = query * query.shape[-1] ** -0.5
    strength = at_least_float32(inputs.strength)[..., None]
    value = at_least_float32(inputs.value) * strength
    outputs = _scan_chunks(
        chunks.split_tokens(query),
        chunks.split_tokens(key),
        chunks.split_tokens(key * strength),
        chunks.split_tokens(value),
        chunks.split_tokens(at_least_float32(inputs.log_decay)[..., None])[..., 0],
        chunks.starts_document,
    )
    return chunks.join_tokens(outputs).to(inputs.value.dtype)


def find_linear_attention(x: Tensor) -> ModuleType | None:
    """Return flash-linear-attention's gated delta rule where it is installed and `x` is on a GPU, in bfloat16.

    In float32 its products would be rounded to ten bits (TF32).
    """
    return _load_linear_attention() if x.is_cuda and x.dtype is torch.bfloat16 else None


@cache
def _load_linear_attention() -> ModuleType | None:
    return import_module("fla.ops.gated_delta_rule") if find_spec("fla") else None


def _apply_fused(fused: ModuleType, inputs: DeltaInputs, documents: Documents) -> Tensor:
    shared_by = inputs.value.shape[1] // inputs.key.shape[1]
    output: Tensor
    output, _ = fused.chunk_gated_delta_rule(
        inputs.query.repeat_interleave(shared_by, 1)[None],
        inputs.key.repeat_interleave(shared_by, 1)[None],
        inputs.value[None],
        g=inputs.log_decay[None],
        beta=inputs.strength[None],
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=documents.cu_lengths.long(),
    )
    return output[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """A row's documents cut into chunks, the last of each filled up with zeros.

    places: the place of each token among all chunks' places. starts_document: of each chunk, on the host.
    """

    tokens: int
    places: Tensor
    starts_document: tuple[bool, ...]

    @staticmethod
    def from_documents(documents: Documents, tokens: int) -> _Chunks:
        lengths = documents.cu_lengths.diff().long()
        counts = (lengths + tokens - 1) // tokens
        first_places = (counts.cumsum(0) - counts) * tokens
        starts = (index == 0 for length in documents.lengths for index in range((length + tokens - 1) // tokens))
        places = first_places[documents.segment_ids()] + documents.position_ids()
        return _Chunks(tokens, places, tuple(starts))

    def split_tokens(self, x: Tensor) -> Tensor:
        """[t, n, d] -> [chunks, n, tokens, d]"""
        split = x.new_zeros(len(self.starts_document) * self.tokens, *x.shape[1:]).index_copy(0, self.places, x)
        return split.unflatten(0, (-1, self.tokens)).transpose(1, 2)

    def join_tokens(self, x: Tensor) -> Tensor:
        """[chunks, n, tokens, d] -> [t, n, d]"""
        return x.transpose(1, 2).flatten(0, 1)[self.places]


def _scale_to_unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPSILON)


def _scan_chunks(
    query: Tensor, key: Tensor, strong_key: Tensor, strong_value: Tensor, decay: Tensor, starts: tuple[bool, ...]
) -> Tensor:
    """Chunks [c, n, tokens, d] and the logarithms of their decays [c, n, tokens] -> outputs [c, n, tokens, dv]"""
    total = decay.cumsum(-1)
    later = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).triu(1)
    # exp(total_i - total_j) is what is left at token i of what token j wrote. Masked first: exp must not overflow.
    left = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    # Row i of the system: what token i writes, but for what tokens before it in the chunk have written.
    system = (strong_key @ key.mT) * left
    sides = torch.cat([strong_value, strong_key * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    written, read_keys = solved.split([strong_value.shape[-1], key.shape[-1]], -1)
    within = (query @ key.mT) * left
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    outputs, state = [], torch.zeros_like(key[0].mT @ written[0])
    parts = zip(query, key, written, read_keys, within, kept, starts, strict=True)
    for queries, keys, values, old_keys, scores, kept_share, is_start in parts:
        if is_start:
            state = torch.zeros_like(state)
        new_values = values - old_keys @ state
        outputs.append(queries @ state + scores @ new_values)
        state = state * kept_share + keys.mT @ new_values
    return torch.stack(outputs)
