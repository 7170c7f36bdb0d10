"""Routed experts as an engine returns them: a .npy file in base64, checked before it is read. Pure.

vLLM writes [tokens, layers, k], with zeros in layers that have no experts. numpy's reader allocates the size in the
header before it looks at the data; here the header has to have the expected size.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

import numpy as np
import numpy.typing as npt

from moejob_api.derived import choice_bytes
from moejob_trainer.rollouts.interface import RoutedLayers

Array = npt.NDArray[Any]

# Version 1.0 and the length of the rest, then a dictionary in numpy's own spelling, padded by spaces to a line.
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(?s:..)\{'descr': '([^']{1,8})', 'fortran_order': False, "
    rb"'shape': \((\d{1,10}), (\d{1,10}), (\d{1,10})\), \} *\n"
)
_HEADER_BYTES, _LARGEST_ITEM = 256, 2
_TYPES = {b"|u1": np.uint8, b"<u2": np.uint16}


class BadRouting(ValueError):
    """Routed experts that are not those of the tokens and the model in question."""


def routed_experts(text: str, tokens: int, of: RoutedLayers) -> Array:
    """Return the experts of each token in each layer that has some. [tokens, routed layers, k]"""
    found = _array(_decoded(text, tokens, of), (tokens, of.layers, of.per_token))[:, of.routed]
    if found.size and int(found.max()) >= of.experts:
        raise BadRouting(f"an answer was routed to expert {int(found.max())} of a model that has {of.experts}")
    ordered = np.sort(found, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise BadRouting(
            "a token was routed twice to one expert of a layer; are the layers of engine and model the same?"
        )
    return found.astype(smallest_type(of.experts))


def smallest_type(experts: int) -> type[np.uint8 | np.int16]:
    """Return the smallest type for the number of an expert, with room for one number more than there are experts."""
    return np.uint8 if choice_bytes(experts) == 1 else np.int16


def _decoded(text: str, tokens: int, of: RoutedLayers) -> bytes:
    most = _HEADER_BYTES + tokens * of.layers * of.per_token * _LARGEST_ITEM
    if len(text) > 4 * (most // 3 + 1):
        raise BadRouting(f"the routed experts of {tokens} tokens came as {len(text)} characters")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRouting(f"routed experts came as what is no base64: {error}") from None


def _array(content: bytes, shape: tuple[int, int, int]) -> Array:
    header = _HEADER.match(content[:_HEADER_BYTES])
    kind = None if header is None else _TYPES.get(header[1])
    if header is None or kind is None:
        raise BadRouting(f"routed experts came as {content[:96]!r}, which is no array of experts")
    claimed = tuple(map(int, header.groups()[1:]))
    if claimed != shape:
        raise BadRouting(f"routed experts came as {claimed} tokens, layers and choices where {shape} were expected")
    found = content[header.end() :]
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    if len(found) != size:
        raise BadRouting(f"routed experts came as {len(found)} bytes where {shape} choices take {size}")
    return np.frombuffer(found, kind).reshape(shape)
