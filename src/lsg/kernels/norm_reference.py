"""Per-sample gradients of a layer norm's scale and shift in PyTorch's operations: what `norm_kernel.py` replaces.

x and g are (B, ..., *shape), mean and rstd (B, ..., 1, ...).
"""

from torch import Tensor


def scale_gradient(x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape)."""
    return sum_positions(g * ((x - mean) * rstd), shape)


def shift_gradient(g: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape)."""
    return sum_positions(g, shape)


def sum_positions(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(B, ..., *shape) -> (B, *shape)."""
    return values.reshape(values.shape[0], -1, *shape).sum(1)
