"""Attention masks that are the same for every key, which need not be there.

Transformers makes one where nothing is masked, but only while a forward is compiled or recorded: it may not look at
values then. PyTorch's fused attention refuses its memory layout (a last stride of 0), and what takes its place keeps
all probabilities, in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

_plain = F.scaled_dot_product_attention


@contextmanager
def without_idle_masks() -> Iterator[None]:
    """Meanwhile `F.scaled_dot_product_attention` computes the same, without masks that are the same for every key.

    Where someone else has replaced it, theirs stays.
    """
    if F.scaled_dot_product_attention is not _plain:
        yield
        return
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _plain


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    idle = attn_mask is not None and attn_mask.dtype == torch.bool and _same_for_every_key(attn_mask)
    given = None if idle else attn_mask
    out = _plain(query, key, value, given, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    # A query may look at all keys, or at none: then its result is zero.
    return torch.where(attn_mask[..., :1], out, 0.0) if idle and attn_mask is not None else out


def _same_for_every_key(mask: Tensor) -> bool:
    return mask.dim() >= 2 and (mask.shape[-1] == 1 or mask.stride(-1) == 0)
