"""Whole models out of the box: tiny random transformers and the package's own networks, against a batch of one."""

from collections.abc import Callable

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from lsg import DPSGD, LSG
from lsg.methods import Method
from lsg.models import small_cnn, wrn28
from tests.support.reference import assert_per_sample_gradients, attach

B = 3
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 40,
    "max_position_embeddings": 24,
}


def text() -> dict[str, Tensor]:
    tokens = torch.randint(4, 40, (B, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(B, 7, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(B, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def pixels() -> Tensor:
    return image()["pixel_values"]


def gpt2() -> nn.Module:
    return t.GPT2LMHeadModel(t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=24))


def opt() -> nn.Module:
    config = t.OPTConfig(**(SMALL | {"ffn_dim": 40, "word_embed_proj_dim": 16}))
    return t.OPTForCausalLM(config)


def llama() -> nn.Module:
    return t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=1))


def t5() -> nn.Module:
    return t.T5EncoderModel(t.T5Config(d_model=16, d_kv=8, d_ff=40, num_layers=2, num_heads=2, vocab_size=40))


def distilbert() -> nn.Module:
    config = t.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=40, vocab_size=40, max_position_embeddings=24)
    return t.DistilBertForSequenceClassification(config)


def deberta() -> nn.Module:
    """Its table of relative positions goes through layers as a matrix."""
    config = t.DebertaConfig(**SMALL, relative_attention=True, pos_att_type=["c2p", "p2c"])
    return t.DebertaForSequenceClassification(config)


def deberta_v3() -> nn.Module:
    kind = {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0}
    config = t.DebertaV2Config(**SMALL, **kind, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return t.DebertaV2ForSequenceClassification(config)


def xlnet() -> nn.Module:
    """Positions first, samples second."""
    return t.XLNetForSequenceClassification(t.XLNetConfig(vocab_size=50, d_model=16, n_layer=2, n_head=2, d_inner=24))


def beit() -> nn.Module:
    config = t.BeitConfig(**SMALL, image_size=8, patch_size=4, use_relative_position_bias=True, drop_path_rate=0.0)
    return t.BeitForImageClassification(config)


def clip() -> nn.Module:
    vision = SMALL | {"image_size": 8, "patch_size": 4, "projection_dim": 8}
    return t.CLIPForImageClassification(t.CLIPConfig(vision_config=vision, text_config=dict(SMALL), num_labels=3))


def swin() -> nn.Module:
    """Windows of all samples in the batch dimension."""
    sizes = {"image_size": 8, "patch_size": 1, "embed_dim": 8, "window_size": 4}
    config = t.SwinConfig(**sizes, depths=[1, 2], num_heads=[2, 2], drop_path_rate=0.0)
    return t.SwinForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor] | Tensor]]] = {
    "bert": (lambda: t.BertForSequenceClassification(t.BertConfig(**SMALL)), text),
    "roberta": (lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**SMALL)), text),
    "mpnet": (lambda: t.MPNetForSequenceClassification(t.MPNetConfig(**SMALL)), text),
    "distilbert": (distilbert, text),
    "gpt2": (gpt2, text),
    "opt": (opt, text),
    "llama": (llama, text),
    "t5_encoder": (t5, text),
    "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**SMALL, image_size=8, patch_size=4)), image),
    "deberta": (deberta, text),
    "deberta-v3": (deberta_v3, text),
    "xlnet": (xlnet, text),
    "beit": (beit, image),
    "clip": (clip, image),
    "swin": (swin, image),
    "wrn28-2": (lambda: wrn28(2), pixels),
    "wrn28-4": (lambda: wrn28(4), pixels),
    "small_cnn": (lambda: small_cnn(10, 3, 8), pixels),
}


def outputs(model: nn.Module, batch: dict[str, Tensor] | Tensor) -> Tensor:
    out = model(**batch) if isinstance(batch, dict) else model(batch)
    if isinstance(out, Tensor):
        return out
    return out.logits if "logits" in out else out.last_hidden_state


def loss(model: nn.Module, batch: dict[str, Tensor] | Tensor) -> Tensor:
    y = outputs(model, batch)
    weights = torch.linspace(-1, 2, y[0].numel(), dtype=y.dtype).cos().view(y.shape[1:])
    return torch.nn.functional.softplus((y * weights).flatten(1).sum(1)).mean()


def no_dropout(model: nn.Module) -> nn.Module:
    """Dropout would make the batch and the batch of one differ; everything else stays in training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_rate", "attn_dropout", "resid_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


@pytest.mark.parametrize("method", [LSG(rank=2, sparsity=0.5), DPSGD()], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_per_sample_gradients_in_double_precision(name: str, method: Method) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = no_dropout(make()).double()
    inputs = batch()
    inputs = inputs.double() if isinstance(inputs, Tensor) else as_double(inputs)
    # Llama's, T5's and DeBERTa's norms compute in float32 whatever the model's dtype.
    tolerance = 1e-6 if name in ("llama", "t5_encoder", "deberta") else 1e-10
    assert_per_sample_gradients(model, method, inputs, B, loss, tolerance)


def as_double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}


@pytest.mark.parametrize("name", MODELS)
def test_trains_out_of_the_box_in_single_precision(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    before = [p.detach().clone() for p in model.parameters()]
    engine, optimizer, _ = attach(model, LSG(rank=2, sparsity=0.5), noise_multiplier=0.1, max_grad_norm=1.0, lr=0.01)
    for _ in range(2):
        loss(model, batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(engine.accountant) == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_single_precision_is_as_good_as_single_precision_gets(name: str) -> None:
    make, batch = MODELS[name]
    torch.manual_seed(0)
    assert_per_sample_gradients(no_dropout(make()), LSG(rank=2, sparsity=0.5), batch(), B, loss, tolerance=1e-6)
