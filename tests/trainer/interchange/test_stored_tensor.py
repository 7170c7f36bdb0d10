"""A tensor that torch.save wrote is read to equal values, whatever its layout, and anything else is refused."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch
from torch import Tensor

from fuzzing import damage_sample, random_sources
from moejob_trainer.interchange.stored_tensor import DTYPES, RefusedTensor, read_stored_tensor


def save_bytes(value: object) -> bytes:
    """Return what torch.save writes."""
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def read(content: bytes, before: int = 0) -> Tensor:
    return read_stored_tensor(io.BytesIO(b"x" * before + content + b"y" * 50), before, len(content))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_each_type_is_read_as_torch_wrote_it(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 5).to(dtype)
    assert torch.equal(read(save_bytes(tensor), before=777), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.arange(12.0).reshape(3, 4).t(), id="transposed"),
        pytest.param(torch.arange(12.0).reshape(3, 4)[1:, ::2], id="a view"),
        pytest.param(torch.zeros(3, 0), id="empty"),
        pytest.param(torch.tensor(3.0), id="a number"),
        pytest.param(torch.ones(1).expand(4, 4), id="expanded"),
        pytest.param(torch.nn.Parameter(torch.ones(2, 2)), id="a parameter"),
    ],
)
def test_each_layout_is_read_as_torch_wrote_it(tensor: Tensor) -> None:
    assert torch.equal(read(save_bytes(tensor)), tensor.detach())


def packed(pickled: bytes, data: bytes, compression: int = zipfile.ZIP_STORED, order: bytes = b"little") -> bytes:
    """Return an archive as torch.save writes it, of these contents."""
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3")
        archive.writestr("archive/byteorder", order)
        archive.writestr("archive/data/0", data)
    return written.getvalue()


def described(offset: str = "K\0", size: str = "K\2", stride: str = "K\1", elements: str = "K\2") -> bytes:
    """Return the pickle of a float32 tensor of one axis."""
    storage = f"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpu{elements}tQ"
    hooks = "ccollections\nOrderedDict\n)R"
    tensor = f"ctorch._utils\n_rebuild_tensor_v2\n({storage}{offset}{size}\x85{stride}\x85\x89{hooks}tR"
    return f"\x80\2{tensor}.".encode("latin-1")


def test_the_description_of_the_rows_below_is_a_tensor() -> None:
    content = packed(described(), b"\0\0\x80\x3f" * 2)
    assert torch.equal(read(content), torch.ones(2))
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), torch.ones(2))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(packed(described(size="K\3"), bytes(8)), "outside of what is stored", id="more than is there"),
        pytest.param(packed(described(offset="K\1"), bytes(8)), "outside of what is stored", id="offset"),
        pytest.param(packed(described(stride="K\x09"), bytes(8)), "outside of what is stored", id="stride"),
        pytest.param(packed(described(offset="J\xff\xff\xff\xff"), bytes(8)), "no whole number", id="negative"),
        pytest.param(packed(described(stride="J\xff\xff\xff\xff"), bytes(8)), "no whole number", id="backwards"),
        pytest.param(packed(described(size="\x8a\x09" + "\xff" * 8 + "\0"), bytes(8)), "no whole number", id="huge"),
        pytest.param(packed(described(elements="J\0\0\0\x7f"), bytes(8)), "stores 8 bytes", id="storage"),
        pytest.param(packed(described(), bytes(4)), "stores 4 bytes", id="too few bytes"),
        pytest.param(packed(described(), bytes(8), zipfile.ZIP_DEFLATED), "compressed", id="compressed"),
        pytest.param(packed(described(), bytes(8), order=b"big"), "big-endian", id="big-endian"),
        pytest.param(packed(pickle.dumps(print), b""), "it names", id="another name"),
        pytest.param(packed(pickle.dumps([1]), b""), "something else than one tensor", id="a list"),
        pytest.param(packed(b"N" * 100_000, b""), "100,000 bytes", id="large pickle"),
        pytest.param(save_bytes(torch.ones(2, dtype=torch.int64)), "it names torch.LongStorage", id="integers"),
        pytest.param(save_bytes({"a": torch.ones(2)}), "something else than one tensor", id="a dictionary"),
        pytest.param(b"", "no archive of a tensor", id="nothing"),
        pytest.param(save_bytes(torch.ones(2))[:-5], "no archive of a tensor", id="cut off"),
    ],
)
def test_what_is_no_tensor_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(RefusedTensor, match=reason):
        read(content)


def test_a_damaged_tensor_is_refused_or_has_the_size_of_what_is_stored() -> None:
    content = save_bytes(torch.ones(4, 4))
    for draw in random_sources():
        try:
            tensor = read(damage_sample(draw, [content]))
        except RefusedTensor:
            continue
        assert tensor.untyped_storage().nbytes() <= len(content)
