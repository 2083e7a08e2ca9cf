"""`nn.MultiheadAttention`: its packed or separate projections and its output, through the linear rule."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.layers.linear import linear, weight_slots
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rows import Rows
from lsg.layers.rule import OUTPUTS_FIRST, Rule
from lsg.layers.samples import SHARED, Axis, SampleAxis, SamplePlaces
from lsg.parameters.slot import Slot


def multihead_attention_forward(
    module: nn.MultiheadAttention,
    patched: PatchedModule,
    places: SamplePlaces,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `nn.MultiheadAttention.forward` computes for batch-first inputs (B, tokens, width)."""
    if is_causal and attn_mask is None:
        raise PrivacyError(f"layer '{patched.name}': is_causal=True is a hint about attn_mask, which is missing")
    if query.dim() != 3:
        raise PrivacyError(
            f"layer '{patched.name}' got a query of shape {tuple(query.shape)}: it must be (B, tokens, width)"
        )
    # Keys and values have their samples where queries have them, or the module's own forward would refuse them.
    axis = places.input()
    carrier_of = Rows(patched, axis, query, 2).carrier
    q, k, v = _projections(module, patched, axis, carrier_of, query, key, value)
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, _extra_token(module.bias_k, patched.slots.get("bias_k"), carrier_of, k)], dim=1)
        v = torch.cat([v, _extra_token(module.bias_v, patched.slots.get("bias_v"), carrier_of, v)], dim=1)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    q, k, v = (torch.unflatten(t, -1, (module.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    # The hint `is_causal` comes with a mask that says the same, so the mask alone is enough.
    mask = _joined_mask(module, attn_mask, key_padding_mask, q, k)
    dropout = module.dropout if module.training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        attention = (scores if mask is None else scores + mask).softmax(-1)
        attention = F.dropout(attention, dropout)
        mixed = attention @ v
        weights = attention.mean(1) if average_attn_weights else attention
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    out = module.out_proj
    joined = mixed.transpose(1, 2).flatten(2)
    slots = weight_slots(patched, "out_proj.weight")
    axis = SampleAxis(0) if axis is SHARED else axis  # the projections have given each sample its own
    return linear(patched, axis, joined, out.weight, out.bias, slots, patched.slots.get("out_proj.bias")), weights


def _projections(
    module: nn.MultiheadAttention,
    patched: PatchedModule,
    axis: Axis,
    carrier_of: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> tuple[Tensor, ...]:
    """Queries, keys and values. One matrix product where all three are the same input and the weight is packed."""
    bias: Any = module.in_proj_bias
    bias_slot = patched.slots.get("in_proj_bias")
    packed: Any = module.in_proj_weight  # None where keys or values have a width of their own
    if packed is not None:
        slots = weight_slots(patched, "in_proj_weight")
        if query is key and key is value:
            return linear(patched, axis, query, packed, bias, slots, bias_slot).chunk(3, dim=-1)
        # Different inputs meet different thirds of one weight: each input goes through all of it, two thirds are
        # dropped. Simple, and right for a weight that is projected as a whole.
        through: list[Tensor] = [linear(patched, axis, x, packed, bias, slots, bias_slot) for x in (query, key, value)]
        return tuple(y.chunk(3, dim=-1)[i] for i, y in enumerate(through))
    separate = zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (query, key, value), strict=True)
    projected = [linear(patched, axis, x, getattr(module, n), None, [patched.slots.get(n)], None) for n, x in separate]
    if bias is None:
        return tuple(projected)
    shift = bias.detach() if bias_slot is None else bias.detach() + carrier_of(bias_slot.carriers[0]).unsqueeze(1)
    shifts = shift.chunk(3, dim=-1)
    return tuple(p + shift for p, shift in zip(projected, shifts, strict=True))


def _extra_token(parameter: Tensor, slot: Slot | None, carrier_of: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """bias_k or bias_v (1, 1, width) as one more token of each sample."""
    value: Any = parameter.detach()
    if slot is not None:
        value = value + carrier_of(slot.carriers[0]).squeeze(1)
    return value.expand(like.shape[0], 1, -1).to(like.dtype)


def _joined_mask(
    module: nn.MultiheadAttention, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor
) -> Tensor | None:
    """Attention mask and padding mask as one additive mask that broadcasts to (B, heads, queries, keys)."""
    extra = (module.bias_k is not None) + module.add_zero_attn
    joined: Tensor | None = None
    for mask, is_padding in ((attn_mask, False), (padding, True)):
        if mask is None:
            continue
        wide = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask
        wide = F.pad(wide.to(q.dtype), (0, int(extra)))
        if is_padding:
            wide = wide[:, None, None, :]
        elif wide.dim() == 3:
            wide = torch.unflatten(wide, 0, (-1, module.num_heads))
        joined = wide if joined is None else joined + wide
    return joined


_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")

MULTIHEAD_ATTENTION = Rule(
    multihead_attention_forward,
    lambda module: {name: OUTPUTS_FIRST for name in _WEIGHTS},
    descendants=lambda module: ("out_proj.weight", "out_proj.bias"),
    known=frozenset({*_WEIGHTS, "in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}),
    fused=lambda module: {"in_proj_weight": 0},
)
