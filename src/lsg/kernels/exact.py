"""Matrix products that are exact to float32 rounding, whatever PyTorch may do to float32 products for speed.

A clipped sum must be the sum of what the norms were taken of. Where terms cancel, an error relative to the terms (as
TF32 or bfloat16 make it) can be larger than their sum, and a sample would pass the bound.

Shapes: B = samples, T = tokens, K = B * T; M, N = rows and columns of the results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lsg.kernels import outer_kernel
from lsg.kernels.optional_triton import usable

_MM_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # PyTorch 2.8 and later
_PARTS = 3  # bfloat16 numbers of 8 bits that hold the 24 bits of a float32 number


def products(rows_BTM: Tensor, columns_BTN: Tensor) -> Tensor:
    """rows^T columns of each sample: (B, M, N)."""
    dtype = torch.promote_types(rows_BTM.dtype, torch.float32)
    with _full_float32(rows_BTM.device.type):
        return rows_BTM.to(dtype).mT @ columns_BTN.to(dtype)


def weighted_sum(rows_BTM: Tensor, columns_BTN: Tensor, weights_B: Tensor) -> Tensor:
    """sum_b w_b rows_b^T columns_b, (M, N), as one product over all tokens. The weights are float32 or better.

    A sample with a number that is not finite must have weight 0: it adds 0.
    """
    on_rows = rows_BTM.shape[2] <= columns_BTN.shape[2]  # the narrower side gets the weights
    if _splits(rows_BTM):
        if on_rows:
            parts_KPM, columns_KN = _weighted_parts(rows_BTM, weights_B), _finite(columns_BTN).flatten(0, 1)
            return _multiply(parts_KPM.flatten(1).T, columns_KN).unflatten(0, (_PARTS, -1)).sum(0)
        rows_KM, parts_KPN = _finite(rows_BTM).flatten(0, 1), _weighted_parts(columns_BTN, weights_B)
        return _multiply(rows_KM.T, parts_KPN.flatten(1)).unflatten(1, (_PARTS, -1)).sum(1)
    dtype = torch.promote_types(rows_BTM.dtype, weights_B.dtype)
    rows, columns = (_finite(t).to(dtype) for t in (rows_BTM, columns_BTN))
    weights_B11 = weights_B.view(-1, 1, 1)
    rows, columns = (rows * weights_B11, columns) if on_rows else (rows, columns * weights_B11)
    with _full_float32(rows.device.type):
        return rows.flatten(0, 1).T @ columns.flatten(0, 1)


def _weighted_parts(values_BTN: Tensor, weights_B: Tensor) -> Tensor:
    """(K, 3, N): each number times its sample's weight, in parts."""
    if usable(values_BTN):
        return outer_kernel.weighted_parts(values_BTN, weights_B)
    return split((_finite(values_BTN) * weights_B.view(-1, 1, 1)).flatten(0, 1))


def _finite(values: Tensor) -> Tensor:
    """0 * NaN is NaN, so 0 takes its place."""
    return values.nan_to_num(0.0, posinf=0.0, neginf=0.0)


def split(values: Tensor) -> Tensor:
    """(K, n) in float32 -> (K, 3, n) in bfloat16: three numbers that add up to each. Each rounds what is left."""
    parts = torch.empty(values.shape[0], _PARTS, values.shape[1], dtype=torch.bfloat16, device=values.device)
    left = values
    for i in range(_PARTS):
        parts[:, i].copy_(left)
        if i + 1 < _PARTS:
            left = left - parts[:, i]  # exact: what a rounding leaves fits into the digits that are free
    return parts


def _splits(values: Tensor) -> bool:
    """Whether tensor cores can multiply parts: products of bfloat16 numbers are exact in float32."""
    return values.is_cuda and values.dtype == torch.bfloat16 and _MM_HAS_OUT_DTYPE


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


@contextmanager
def _full_float32(device_type: str) -> Iterator[None]:
    """Float32 products in float32, and no autocast. The former is a setting of the process: it is put back."""
    # Newer versions have a setting for each library, beside the older one for all, and refuse to read the older one
    # where the two disagree.
    switches = _switches()
    before = [switch.fp32_precision for switch in switches]
    older: str | None = None
    with torch.autocast(device_type, enabled=False):
        try:
            if not switches or any(precision not in ("ieee", "none") for precision in before):
                for switch in switches:
                    switch.fp32_precision = "ieee"
                older = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("highest")
            yield
        finally:
            if older is not None:
                torch.set_float32_matmul_precision(older)
            for switch, precision in zip(switches, before, strict=True):
                if switch.fp32_precision != precision:
                    switch.fp32_precision = "none"  # as the settings above it say
                    if switch.fp32_precision != precision:
                        switch.fp32_precision = precision


def _switches() -> list[Any]:
    libraries = (torch.backends.cuda, torch.backends.mkldnn)
    matmuls = (getattr(library, "matmul", None) for library in libraries)
    return [matmul for matmul in matmuls if hasattr(matmul, "fp32_precision")]
