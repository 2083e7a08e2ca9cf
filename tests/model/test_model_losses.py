"""Losses that a model computes itself: those of transformers' heads keep records apart, others are checked by value."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as t
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING

from lsg import DPSGD, PrivacyError
from lsg.check.loss_check import check_loss
from lsg.losses import per_sequence
from lsg.model import model_losses
from tests.support.reference import attach, slice_sample

B, T, V = 4, 6, 30
SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": V,
    "max_position_embeddings": 16,
}


def llama(kind: str = "ForCausalLM", **options: Any) -> nn.Module:
    config = t.LlamaConfig(**SMALL, num_key_value_heads=1, pad_token_id=0, **options)
    return getattr(t, f"Llama{kind}")(config)  # type: ignore[no-any-return]


def bert(kind: str, **options: Any) -> nn.Module:
    return getattr(t, f"Bert{kind}")(t.BertConfig(**SMALL, **options))  # type: ignore[no-any-return]


def vit(**options: Any) -> nn.Module:
    config = t.ViTConfig(**{k: v for k, v in SMALL.items() if "vocab" not in k}, image_size=8, patch_size=4, **options)
    return t.ViTForImageClassification(config)


def text() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(4, V, (B, T), generator=generator)}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def masked() -> Tensor:
    """6, 4, 2 and no labels."""
    labels = text()["input_ids"].clone()
    for i in range(B):
        labels[i, T - 2 * i :] = -100
    return labels


SEGMENTS = torch.randint(0, 3, (B, 8, 8), generator=torch.Generator().manual_seed(1))
SEGMENTS[0, :6], SEGMENTS[3] = 255, 255
SOME = torch.tensor([1, -100, 0, 2])
Case = tuple[Callable[[], nn.Module], dict[str, Tensor]]
# Each: a model whose loss function is replaced, and a batch that a mean over all labels gets wrong.
REPLACED: dict[str, Case] = {
    "causal": (llama, text() | {"labels": masked()}),
    "tokens": (lambda: llama("ForTokenClassification", num_labels=V), text() | {"labels": masked()}),
    "sequence": (lambda: llama("ForSequenceClassification", num_labels=3), text() | {"labels": SOME}),
    "image": (lambda: vit(num_labels=3), image() | {"labels": SOME}),
    "regression": (lambda: llama("ForSequenceClassification", num_labels=1), text() | {"labels": torch.randn(B)}),
    "regressions": (
        lambda: llama("ForSequenceClassification", num_labels=3, problem_type="regression"),
        text() | {"labels": torch.randn(B, 3)},
    ),
    "multi_label": (lambda: llama("ForSequenceClassification", num_labels=3), text() | {"labels": torch.rand(B, 3)}),
    "questions": (
        lambda: llama("ForQuestionAnswering"),
        text() | {"start_positions": torch.tensor([0, 9, 1, 2]), "end_positions": torch.tensor([[1], [9], [4], [3]])},
    ),
    "masked": (lambda: t.ModernBertForMaskedLM(modernbert()), text() | {"labels": masked()}),
}


def modernbert() -> Any:
    return t.ModernBertConfig(**SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)


def segformer() -> nn.Module:
    sizes = {"num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [8], "patch_sizes": [3]}
    config = t.SegformerConfig(**sizes, strides=[2], num_attention_heads=[2], mlp_ratios=[1], num_labels=3)
    return t.SegformerForSemanticSegmentation(config)


def plain_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of each record alone, by transformers itself; 0 where it has no label."""
    losses = [model(**slice_sample(batch, i)).loss for i in range(B)]
    return torch.stack(losses).nan_to_num(0.0)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", REPLACED)
def test_heads_of_transformers_keep_records_apart(case: str, reduction: str) -> None:
    torch.manual_seed(0)
    make, batch = REPLACED[case]
    model = make().eval()
    alone = plain_losses(model, batch)
    before = model(**batch).loss
    engine, _, _ = attach(model, DPSGD(), loss_reduction=reduction)
    output = model(**batch, num_items_in_batch=torch.tensor(3)) if case == "causal" else model(**batch)
    torch.testing.assert_close(output.loss, alone.mean() if reduction == "mean" else alone.sum())
    output.loss.backward()
    one = copy.deepcopy(model)
    one(**slice_sample(batch, 0)).loss.backward()
    for name, gradient in engine.per_sample_gradients().items():
        wanted = one.get_parameter(name).grad
        assert wanted is not None
        torch.testing.assert_close(gradient[0], wanted, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(plain(**batch).loss, before, equal_nan=True)
    engine.detach()
    assert "_loss_function" not in vars(model)
    torch.testing.assert_close(model(**batch).loss, before, equal_nan=True)


def test_a_model_inside_another_and_a_loss_function_of_the_users_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = llama()

        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return self.inner(input_ids, labels=labels)

    model = Outer().eval()
    batch = text() | {"labels": masked()}
    alone = plain_losses(model, batch)
    engine, _, _ = attach(model, DPSGD())
    torch.testing.assert_close(model(**batch).loss, alone.mean())
    engine.detach()

    def own(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return per_sequence(logits, labels)

    model.inner.loss_function = own
    engine, _, _ = attach(model, DPSGD())
    assert model.inner.loss_function is own
    engine.detach()
    assert model.inner.loss_function is own


def check(model: nn.Module, batch: dict[str, Tensor], reduction: Any = "mean") -> bool:
    return check_loss(model, model.forward, ((), batch), B, reduction)


def test_segments_of_images_keep_records_apart() -> None:
    logits, other = torch.randn(2, B, 3, 4, 4, dtype=torch.float64)
    plain = LOSS_MAPPING["ForSemanticSegmentation"]
    known = next(ours for theirs, ours in model_losses._known() if theirs is plain)
    loss = model_losses.RecordLoss("model", plain, known, "sum")
    alone = [plain(z[None], y[None], auxiliary_logits=a[None]) for z, y, a in zip(logits, SEGMENTS, other, strict=True)]
    wanted = torch.stack(alone).nan_to_num(0.0).sum()
    torch.testing.assert_close(loss(logits, SEGMENTS, auxiliary_logits=other, num_items_in_batch=5), wanted)


def test_logits_in_which_records_are_not_rows_are_refused_by_name() -> None:
    model = llama()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"LlamaForCausalLM computes its loss from logits of shape \(24, 30\)"):
        model.loss_function(logits=torch.randn(B * T, V), labels=FULL.flatten(), vocab_size=V)


def t5() -> nn.Module:
    return t.T5ForConditionalGeneration(
        t.T5Config(
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            vocab_size=V,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    )


def bart() -> nn.Module:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = t.BartConfig(d_model=8, vocab_size=V, encoder_ffn_dim=16, decoder_ffn_dim=16, **sizes)
    return t.BartForConditionalGeneration(config)


def gpt2(kind: str) -> nn.Module:
    return getattr(t, f"GPT2{kind}")(  # type: ignore[no-any-return]
        t.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=V, n_positions=16, num_labels=3, pad_token_id=0)
    )


FULL = text()["input_ids"]
OWN_LOSS: dict[str, Case] = {
    "t5": (t5, text() | {"labels": FULL}),
    "bart": (bart, text() | {"labels": FULL}),
    "bert_masked": (lambda: bert("ForMaskedLM"), text() | {"labels": FULL}),
    "bert_tokens": (lambda: bert("ForTokenClassification"), text() | {"labels": FULL % 2}),
    "gpt2_tokens": (lambda: gpt2("ForTokenClassification"), text() | {"labels": FULL % 3}),
    "segments": (segformer, image() | {"labels": SEGMENTS.where(SEGMENTS != 255, 1)}),
    "llama_as_it_was": (llama, text() | {"labels": FULL}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", OWN_LOSS)
def test_a_mean_over_all_tokens_is_refused_by_name(case: str, dtype: torch.dtype) -> None:
    """Even where all sequences are equally long."""
    torch.manual_seed(0)
    make, batch = OWN_LOSS[case]
    model = make().to(dtype)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    with pytest.raises(PrivacyError, match=rf"{type(model).__name__}.*lsg\.losses\.per_sequence"):
        check(model, batch)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("case", ["t5", "bert_masked", "gpt2_tokens"])
def test_a_mean_over_all_tokens_inside_a_model_shows_in_its_gradient(case: str) -> None:
    torch.manual_seed(0)
    make, batch = OWN_LOSS[case]
    labels = batch["labels"].clone()
    labels[0, 2:], labels[1, 1:] = -100, -100
    model = make()
    model.train()
    attach(model, DPSGD())
    with pytest.raises(PrivacyError, match=r"divided by a sum over all records|is not the mean of the losses"):
        model(**batch | {"labels": labels}).loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["bert", "gpt2", "questions", "llama", "hidden"])
def test_what_is_right_by_nature_is_let_through(case: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    one = torch.tensor([1, 0, 2, 1])
    made: dict[str, Case] = {
        "bert": (lambda: bert("ForSequenceClassification", num_labels=3), text() | {"labels": one}),
        "gpt2": (lambda: gpt2("ForSequenceClassification"), text() | {"labels": one}),
        "questions": (lambda: bert("ForQuestionAnswering"), text() | {"start_positions": one, "end_positions": one}),
        "llama": (llama, text() | {"labels": FULL}),
        "hidden": (lambda: bert("Model"), text()),
    }
    make, batch = made[case]
    model = make().to(dtype)
    engine, _, _ = attach(model, DPSGD())
    assert check(model, batch) is (case != "hidden")
    engine.detach()
    assert not check_loss(model, model.forward, ((), slice_sample(batch, 0)), 1)


class OwnLoss(nn.Module):
    """Returns logits and a loss, of a kind."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.temperature, self.loss = nn.Linear(3, V), nn.Parameter(torch.ones(())), loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.layer(x) * self.temperature
        return logits, self.temperature * 1, None if labels is None else self.loss(logits, labels)


X = torch.randn(B, T, 3, generator=torch.Generator().manual_seed(2))


def test_losses_of_own_models() -> None:
    def run(loss: Any, reduction: Any = "mean", *, x: Tensor = X, labels: Tensor | None = FULL) -> bool:
        model = OwnLoss(loss)
        return check_loss(model, model.forward, ((x, labels), {}), B, reduction)

    assert run(per_sequence)
    assert run(lambda z, y: per_sequence(z, y, reduction="sum"), "sum")
    with pytest.raises(PrivacyError, match="not the sum of the losses"):
        run(per_sequence, "sum")
    with pytest.raises(PrivacyError, match="not the mean of the losses"):
        run(lambda z, y: per_sequence(z, y, reduction="sum"))
    with pytest.raises(PrivacyError, match="OwnLoss"):  # contrastive
        run(lambda z, y: F.cross_entropy(z.mean(1) @ z.mean(1).T, torch.arange(len(z))))
    with pytest.raises(PrivacyError, match="OwnLoss"):
        run(lambda z, y: F.cross_entropy(z.mT, y))
    with pytest.raises(PrivacyError, match="OwnLoss"):
        run(lambda z, y: F.cross_entropy(z.mT, y, ignore_index=0), labels=FULL)
    with pytest.raises(PrivacyError, match="does not run on a few records"):
        run(lambda z, y: z.view(B, T, -1).mean())
    assert run(lambda z, y: z.square().mean(), labels=FULL.float())
    with pytest.warns(UserWarning, match="OwnLoss.*random numbers"):
        run(lambda z, y: (z * torch.randn_like(z)).square().mean())
    assert run(per_sequence, labels=None)  # the temperature: it is no function of the records


def test_a_loss_in_training_mode_only() -> None:
    class Trained(OwnLoss):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(x, labels) if self.training else self.layer(x)

    model = Trained(lambda z, y: F.cross_entropy(z.mT, y))
    with pytest.raises(PrivacyError, match="Trained"):
        check_loss(model, model.forward, ((X,), {"labels": FULL}), B)
    assert model.training
