"""Messages for tests: hypothesis draws trees of every kind of value, and this compares them."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from shoal.wire.slots import DTYPES, bytes_of

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.text(min_size=1500, max_size=1600)
    | st.binary(max_size=20)
    | st.binary(min_size=1500, max_size=1600)
)
keys = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Every dtype, any shape with 0 to 4 dimensions, and every odd way to lie in memory."""
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    count = math.prod(shape)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        data = bytes(byte % 2 for byte in data)
    raw = torch.tensor(list(data), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    match draw(st.sampled_from(["plain", "transposed", "expanded", "strided"])):
        case "transposed" if tensor.dim() >= 2:
            return tensor.transpose(0, -1)
        case "expanded":
            return tensor.unsqueeze(0).expand(3, *shape)
        case "strided" if tensor.dim() and tensor.shape[0] > 1:
            return tensor[::2]
    return tensor


trees = st.recursive(
    scalars | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)
    if isinstance(a, dict):
        # True and 1 are one key to Python, so the types of keys are compared too.
        return [*map(typed, a)] == [*map(typed, b)] and all(
            same(x, y) for x, y in zip(a.values(), b.values(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def typed(key: Any) -> tuple[type, Any]:
    return type(key), key


def bits(tensor: torch.Tensor) -> bytes:
    if tensor.dtype == torch.complex32:  # torch warns of every new tensor of this dtype
        tensor = tensor.view(torch.int32)
    return bytes(bytes_of(tensor.contiguous()).tolist())
