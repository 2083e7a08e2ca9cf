"""The product behind every projected layer: (p F^T)^T q for each sample, on the kept entries of q only.

The plain path is two batched products and a selection. On a CUDA device, where those read p and q from memory several
times in thin slices, one Triton kernel reads each of them once (`kernels.py`); the plain path is its reference.
"""

import torch
from torch import Tensor

from lsg.layers import kernels

# One program handles one sample, so a batch has to fill the chip; and a sample's tokens have to fill a tile.
_FEWEST_SAMPLES, _FEWEST_TOKENS, _LARGEST_RANK = 32, 16, 64


def select(values: Tensor, kept: Tensor | None) -> Tensor:
    """The kept entries along the last dimension."""
    return values if kept is None else values.index_select(-1, kept)


def factor_gradient(p_BTP: Tensor, factor_rP: Tensor, q_BTQ: Tensor, kept: Tensor | None, place: Tensor | None) -> Tensor:
    """p (B, T, P) and q (B, T, Q), projected onto `factor` on p's side -> (B, r, kept).

    `kept` are the indices of the kept entries of Q and `place` is where each entry of Q goes among them, -1 where
    masked (both None: all are kept).
    """
    if _kernel_pays(p_BTP, factor_rP):
        width = q_BTQ.shape[2] if kept is None else kept.shape[0]
        return kernels.factor_gradient(p_BTP.contiguous(), factor_rP, q_BTQ.contiguous(), place, width)
    return plain_factor_gradient(p_BTP, factor_rP, q_BTQ, kept)


def plain_factor_gradient(p_BTP: Tensor, factor_rP: Tensor, q_BTQ: Tensor, kept: Tensor | None) -> Tensor:
    """The same in plain PyTorch, in p's precision."""
    return select((p_BTP @ factor_rP.mT).mT @ q_BTQ, kept)


def _kernel_pays(p_BTP: Tensor, factor_rP: Tensor) -> bool:
    return (
        kernels.AVAILABLE
        and p_BTP.is_cuda
        and p_BTP.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and p_BTP.shape[0] >= _FEWEST_SAMPLES
        and p_BTP.shape[1] >= _FEWEST_TOKENS
        and factor_rP.shape[0] <= _LARGEST_RANK
    )
