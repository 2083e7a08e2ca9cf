"""Triton where it is installed, and the one place that says whether its kernels may run.

A CPU build of PyTorch comes without: AVAILABLE is False.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "tl", "triton", "usable", "without_kernels"]


def usable(values: Tensor) -> bool:
    """Whether kernels can work on such a tensor: on a GPU, in a precision that they know."""
    return AVAILABLE and values.is_cuda and values.dtype in (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Everything by the kernels' references."""
    global AVAILABLE
    available, AVAILABLE = AVAILABLE, False
    try:
        yield
    finally:
        AVAILABLE = available


def untransformed() -> bool:
    """No compiler, tracer or functorch at work: tensors are what they seem, and what Python keeps of them is kept."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return not traced and not torch._C._are_functorch_transforms_active()
