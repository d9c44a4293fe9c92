"""Hypothesis strategies for tensors of every kind that a checkpoint may hold."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

_NAMES = (
    "float16 bfloat16 float32 float64 complex32 complex64 complex128 bool int8 int16 int32 int64 uint8 uint16 uint32 "
    "uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]

FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple) | st.sampled_from([(700,), (40, 60), (3, 2000)])


def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A contiguous tensor of random bytes."""
    count = int(torch.Size(shape).numel())
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (max(count, 1) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)[:count].reshape(shape) if count else torch.empty(shape, dtype=dtype)


@st.composite
def contiguous(draw: st.DrawFn, dtypes: list[torch.dtype] = DTYPES) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(dtypes)), draw(SHAPES)
    if dtype is FLOAT4 and not shape:
        shape = (1,)  # two numbers in a byte: there is no single one
    return make(dtype, shape, draw(st.integers(0, 2**32)))


@st.composite
def any_layout(draw: st.DrawFn) -> torch.Tensor:
    """Whole tensors, views, transposed, strided and expanded ones, parameters."""
    tensor = draw(contiguous())
    kind = draw(
        st.sampled_from(["whole", "part", "transposed", "strided", "expanded", "conjugate", "parameter"])
    )
    if kind == "part" and tensor.dim() and tensor.shape[0] > 1:
        return tensor[1:]
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == "strided" and tensor.dim() and tensor.shape[-1] > 1:
        return tensor[..., ::2]
    if kind == "expanded":
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    if kind == "conjugate" and tensor.is_complex():
        return tensor.conj()
    if kind == "parameter":
        trainable = tensor.is_floating_point() or tensor.is_complex()
        return torch.nn.Parameter(tensor, requires_grad=trainable)
    return tensor
