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
    """Routed experts that do not fit the tokens or the model."""


def decode_routed_experts(text: str, tokens: int, routed_layers: RoutedLayers) -> Array:
    """Return the experts of each token in each layer that has some. [tokens, routed layers, k]"""
    choices = _parse_array(
        _decode_base64(text, tokens, routed_layers), (tokens, routed_layers.layers, routed_layers.per_token)
    )[:, routed_layers.routed]
    if choices.size and int(choices.max()) >= routed_layers.experts:
        raise BadRouting(
            f"an answer was routed to expert {int(choices.max())} of a model that has {routed_layers.experts}"
        )
    sorted_choices = np.sort(choices, axis=-1)
    if (sorted_choices[..., 1:] == sorted_choices[..., :-1]).any():
        raise BadRouting(
            "a token was routed twice to one expert of a layer; are the layers of engine and model the same?"
        )
    return choices.astype(smallest_type(routed_layers.experts))


def smallest_type(experts: int) -> type[np.uint8 | np.int16]:
    """Return the smallest type for the number of an expert, with room for one number more than there are experts."""
    return np.uint8 if choice_bytes(experts) == 1 else np.int16


def _decode_base64(text: str, tokens: int, routed_layers: RoutedLayers) -> bytes:
    most_bytes = _HEADER_BYTES + tokens * routed_layers.layers * routed_layers.per_token * _LARGEST_ITEM
    if len(text) > 4 * (most_bytes // 3 + 1):
        raise BadRouting(f"the routed experts of {tokens} tokens came as {len(text)} characters")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRouting(f"routed experts came as what is no base64: {error}") from None


def _parse_array(content: bytes, shape: tuple[int, int, int]) -> Array:
    header = _HEADER.match(content[:_HEADER_BYTES])
    kind = None if header is None else _TYPES.get(header[1])
    if header is None or kind is None:
        raise BadRouting(f"routed experts came as {content[:96]!r}, which is no array of experts")
    claimed = tuple(map(int, header.groups()[1:]))
    if claimed != shape:
        raise BadRouting(f"routed experts came as {claimed} tokens, layers and choices where {shape} were expected")
    data = content[header.end() :]
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    if len(data) != size:
        raise BadRouting(f"routed experts came as {len(data)} bytes where {shape} choices take {size}")
    return np.frombuffer(data, kind).reshape(shape)
