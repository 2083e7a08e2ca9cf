"""Attention without masks that mask nothing, or everything, for all keys alike: the same values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import RobertaConfig, RobertaForSequenceClassification

from lsg import LSG, PerfConfig
from lsg.layers import idle_masks
from lsg.layers.idle_masks import without_idle_masks
from tests.reference import attach

B, H, T, D = 3, 2, 5, 4
open_queries = torch.arange(T).ne(2).view(1, 1, T, 1)  # the third may look at nothing


@pytest.mark.parametrize(
    ("mask", "idle"),
    [
        (open_queries.expand(B, 1, T, T), True),
        (open_queries, True),
        (open_queries[0, 0].expand(T, T), True),
        (torch.ones(T, T, dtype=torch.bool).tril(), False),
        (open_queries.expand(B, 1, T, T).contiguous(), False),
        (torch.zeros(1, 1, T, 1).expand(B, 1, T, T), False),  # added to scores, not a choice
        (None, False),
    ],
)
def test_values_and_gradients_are_the_same(mask: Tensor | None, idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    given: list[Tensor | None] = []
    plain = idle_masks._plain

    def watched(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        given.append(attn_mask)
        return plain(query, key, value, attn_mask, *args, **kwargs)

    def run() -> list[Tensor]:
        y = F.scaled_dot_product_attention(*operands, attn_mask=mask, scale=0.3)
        return [y, *torch.autograd.grad(y.square().sum(), operands)]

    wanted = run()
    with without_idle_masks():
        monkeypatch.setattr(idle_masks, "_plain", watched)
        found = run()
        monkeypatch.undo()
    assert len(given) == 1 and given[0] is (None if idle else mask)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_it_is_put_back_and_leaves_a_replacement_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.scaled_dot_product_attention
    with pytest.raises(ValueError), without_idle_masks():
        assert F.scaled_dot_product_attention is not plain
        with without_idle_masks():
            pass
        assert F.scaled_dot_product_attention is not plain
        raise ValueError
    assert F.scaled_dot_product_attention is plain
    theirs: Callable[..., Tensor] = lambda *args, **kwargs: args[0]  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    with without_idle_masks():
        assert F.scaled_dot_product_attention is theirs


def test_a_compiled_encoder_without_a_mask_has_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers makes the mask: if that changes, this tells."""
    met: list[bool] = []
    same = idle_masks._same_for_every_key

    def watched(mask: Tensor) -> bool:
        met.append(same(mask))
        return met[-1]

    monkeypatch.setattr(idle_masks, "_same_for_every_key", watched)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)  # what transformers is told is enough
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda tensor=None: True)
    config = RobertaConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = RobertaForSequenceClassification(config)
    attach(model, LSG(rank=2), perf=PerfConfig(compile=True))
    model(torch.randint(3, 20, (B, T)))
    assert met and all(met)
