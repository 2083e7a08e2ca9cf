"""Positions that depend on the longest record of a batch are refused, and trained where they do not."""

import copy
from typing import Any

import pytest
import torch
import transformers

from lsg import DPSGD, PrivacyError
from tests.support.reference import attach

END = 12  # tokens that have positions of their own
KINDS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": END,
    },
}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=END if kind == "dynamic" else 4 * END,
        rope_parameters=KINDS[kind],
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_scales_positions_is_refused_in_training(kind: str) -> None:
    model = model_of(kind)
    long, short = torch.ones(3, END + 1, dtype=torch.long), torch.ones(3, END, dtype=torch.long)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        plain = copied(long).logits
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"'model.rotary_emb' .* here of 13 tokens, .* cut records at the 12 tokens"):
        model(long)
    with torch.no_grad():
        assert torch.allclose(model(long).logits, plain)  # evaluation and generation are nobody's gradient
    model(short).logits.mean((1, 2)).mean().backward()
    copy.deepcopy(model)(long)
