"""Attention in compiled and recorded forwards: the masks that a model is given, and no others."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_upper_left
from transformers import LlamaConfig, LlamaForSequenceClassification, RobertaConfig, RobertaForSequenceClassification
from transformers import masking_utils as masks

from lsg import LSG, PerfConfig
from lsg.speed.transformers_masks import without_needless_masks
from tests.support.reference import attach

B, T = 3, 5
pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's own compiler warns of itself


def encoder() -> nn.Module:
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return RobertaForSequenceClassification(RobertaConfig(vocab_size=20, intermediate_size=16, **small)).eval()


def decoder() -> nn.Module:
    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForSequenceClassification(LlamaConfig(vocab_size=20, intermediate_size=16, pad_token_id=0, **small))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor | None, bool]]:
    """Mask and causality of each call of PyTorch's attention; `torch.compile` compiles nothing."""
    plain, found = F.scaled_dot_product_attention, []

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        found.append((kwargs["attn_mask"], kwargs["is_causal"]))
        return plain(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(torch, "compile", lambda forward, **options: forward)
    return found


@pytest.mark.parametrize(("make", "causal"), [(encoder, False), (decoder, True)])
def test_a_model_that_was_given_no_mask_has_none(
    make: Any, causal: bool, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randint(3, 20, (B, T))
    wanted = model(x).logits
    given.clear()
    monkeypatch.setattr(masks, "is_tracing", lambda tensor=None: True)  # as while compiling
    model(x)
    assert given[0][0] is not None  # without lsg: if that changes, none of this is needed
    given.clear()
    attach(model, LSG(rank=2), perf=PerfConfig(compile=True))
    found = model(x).logits
    assert given[-1] == (None, causal)
    torch.testing.assert_close(found, wanted)


def test_a_mask_that_was_given_is_kept(given: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "is_tracing", lambda tensor=None: True)
    model = encoder()
    attach(model, LSG(rank=2), perf=PerfConfig(compile=True))
    model(torch.randint(3, 20, (B, T)), attention_mask=torch.ones(B, T, dtype=torch.long))
    assert given[-1][0] is not None


def test_everything_is_put_back() -> None:
    plain = masks.is_tracing
    with pytest.raises(ValueError), without_needless_masks():
        told = masks.is_tracing
        assert told is not plain and not told(None)
        with without_needless_masks():
            assert masks.is_tracing is told
        assert masks.is_tracing is told
        raise ValueError
    assert masks.is_tracing is plain
    with without_needless_masks():
        assert masks.is_tracing is told  # the same each time: compiled code is compiled for it


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).unsqueeze(1)
        return F.scaled_dot_product_attention(h, h, h, attn_mask=causal_upper_left(T, T)).squeeze(1)


def test_other_models_masks_mean_what_they_meant() -> None:
    torch.manual_seed(0)
    model, x = Biased(), torch.randn(B, T, 8)
    wanted = model(x)
    attach(model, LSG(rank=2), perf=PerfConfig(compile=True))
    torch.testing.assert_close(model(x), wanted)
