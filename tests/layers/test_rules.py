"""Every layer rule against a batch of one, in float64: LSG where the weight is a matrix, and DPSGD everywhere."""

import copy
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D

from lsg import DPSGD, LSG, RGP, PrivacyError, SparseDPSGD
from lsg.layers import conv, fallback, rms_norm
from lsg.layers.registry import rule_for
from lsg.parameters.slot import Layout, Slot, refresh_casts
from lsg.subspace import Subspace
from tests.support.reference import assert_per_sample_gradients, attach, batch_of_one_gradients

B = 5
METHODS = [LSG(rank=2, sparsity=0.4), RGP(rank=2), DPSGD(), SparseDPSGD(sparsity=0.3)]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def tokens(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(7))


class Scaled(nn.Module):
    """A custom leaf module with bare parameters of odd shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(1, 6) + 0.5)
        self.shift = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.gain).tanh() + self.shift


class RmsNorm(nn.Module):
    """As in Llama and its kin."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Prefixed(nn.Module):
    """Bare parameters of a module that has children of its own, as in ViT's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 12))
        self.inner = nn.Linear(6, 12)
        self.table = nn.ParameterList([nn.Parameter(torch.randn(1, 4, 12))])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), self.inner(x)], dim=1) + self.table[0]


class OffsetEmbedding(nn.Embedding):
    """A subclass that calls its parent's forward, as in OPT."""

    def forward(self, token: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(token + 2)


class ScaledEmbedding(nn.Embedding):
    """Looks up something else than its weight."""

    def forward(self, token: Tensor) -> Tensor:  # type: ignore[override]
        return F.embedding(token, self.weight * 2, self.padding_idx)


class NamedLinear(nn.Linear):
    """Names its arguments."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        assert self.weight.shape == (self.out_features, self.in_features)  # reads no values
        return F.linear(input=x, weight=self.weight, bias=self.bias).tanh()


class EqualisedLinear(nn.Linear):
    """Computes with a multiple of its weight."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class SeparateBias(nn.Linear):
    """Adds its bias by itself."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x @ self.weight.T + self.bias


class LoraLinear(nn.Linear):
    """Parameters that its parent does not have."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + x @ self.down.T @ self.up.T


class Positions(nn.Module):
    """Position indices without a batch dimension, of one or two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(20, 12), nn.Embedding(9, 12)
        self.kind = nn.Embedding(2, 12)

    def forward(self, token: Tensor) -> Tensor:
        length = token.shape[1]
        return self.embed(token) + self.position(torch.arange(length)) + self.kind(torch.zeros(1, length).long())


class Repeated(nn.Module):
    """One module called several times, one skipped, one parameter unused, and a weight tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.skipped = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, token: Tensor) -> Tensor:
        x = self.embed(token)
        return self.head(self.mix(self.mix(x).tanh()))


class WeightedBag(nn.Module):
    """Weights of a bag's entries, which are trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 12, mode="sum")
        self.importance = nn.Embedding(20, 1)

    def forward(self, token: Tensor) -> Tensor:
        return self.bag(token, per_sample_weights=self.importance(token).squeeze(-1).exp())


class Folded(nn.Module):
    """Flattens batch and tokens before its linear layers, as OPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).reshape(-1, 12))
        return self.second(hidden).view(x.shape)


class Attention(nn.Module):
    def __init__(self, cross: bool = False, weights: bool = False, **options: object) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True, **options)  # type: ignore[arg-type]
        self.cross, self.weights = cross, weights

    def forward(self, x: Tensor) -> Tensor:
        keys = x.flip(1)[:, :3] if self.cross else x
        padding = torch.zeros(keys.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        if self.attention.vdim != 12:
            keys, values = x[:, :3, :8], x[:, :3, :10]
            padding = None
        else:
            values = keys
        out, attention = self.attention(x, keys, values, key_padding_mask=padding, need_weights=self.weights)
        return out if attention is None else torch.cat([out.flatten(1), attention.flatten(1)], dim=1)


CASES = {
    "linear": (lambda: nn.Linear(12, 9), normal(B, 12)),
    "linear_tokens": (lambda: nn.Linear(12, 9), normal(B, 4, 12)),
    "linear_rank5": (lambda: nn.Linear(12, 9), normal(B, 2, 3, 2, 12)),
    "linear_no_bias": (lambda: nn.Linear(9, 12, bias=False), normal(B, 4, 9)),
    "conv1d_transformers": (lambda: Conv1D(9, 12), normal(B, 4, 12)),
    "conv1d": (lambda: nn.Conv1d(6, 9, 3, padding=1), normal(B, 6, 11)),
    "conv2d": (lambda: nn.Conv2d(6, 9, 3, padding=1), normal(B, 6, 7, 8)),
    "conv2d_1x1": (lambda: nn.Conv2d(9, 8, 1), normal(B, 9, 5, 5)),
    "conv2d_stride": (lambda: nn.Conv2d(6, 9, 3, stride=2, padding=1, bias=False), normal(B, 6, 8, 7)),
    "conv2d_stride_leftover": (lambda: nn.Conv2d(6, 9, 2, stride=3), normal(B, 6, 9, 10)),
    "conv2d_dilated": (lambda: nn.Conv2d(6, 9, (3, 2), dilation=(2, 3), padding=(1, 2)), normal(B, 6, 9, 9)),
    "conv2d_wide_padding": (lambda: nn.Conv2d(6, 9, 3, padding=4), normal(B, 6, 5, 5)),
    "conv2d_circular": (lambda: nn.Conv2d(6, 9, 3, padding=1, padding_mode="circular"), normal(B, 6, 6, 5)),
    "conv2d_same": (lambda: nn.Conv2d(6, 9, (4, 3), padding="same"), normal(B, 6, 6, 5)),
    "conv2d_groups": (lambda: nn.Conv2d(6, 9, 3, groups=3, padding=1), normal(B, 6, 6, 5)),
    "conv2d_depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, stride=2), normal(B, 6, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2, stride=(1, 2, 1), padding=1), normal(B, 4, 4, 5, 3)),
    "conv_transpose": (lambda: nn.ConvTranspose2d(6, 4, 3), normal(B, 6, 4, 4)),
    "embedding": (lambda: nn.Embedding(20, 12), tokens(20, B, 6)),
    "embedding_padding": (lambda: nn.Embedding(20, 12, padding_idx=3), tokens(6, B, 6)),
    "embedding_labels": (lambda: nn.Embedding(20, 12), tokens(20, B)),
    "embedding_subclass": (lambda: OffsetEmbedding(20, 12), tokens(18, B, 6)),
    "embedding_subclass_scaled": (lambda: ScaledEmbedding(20, 12, padding_idx=3), tokens(20, B, 6)),
    "embedding_bag_sum": (lambda: nn.EmbeddingBag(20, 12, mode="sum"), tokens(20, B, 6)),
    "embedding_bag_mean": (lambda: nn.EmbeddingBag(20, 12), tokens(20, B, 6)),
    "embedding_bag_max": (lambda: nn.EmbeddingBag(20, 12, mode="max"), tokens(20, B, 6)),
    "embedding_bag_padding_sum": (lambda: nn.EmbeddingBag(20, 12, mode="sum", padding_idx=3), tokens(6, B, 6)),
    "embedding_bag_padding_mean": (lambda: nn.EmbeddingBag(20, 12, padding_idx=-17), tokens(6, B, 6)),
    "embedding_bag_padding_max": (lambda: nn.EmbeddingBag(20, 12, mode="max", padding_idx=3), tokens(6, B, 6)),
    "embedding_bag_weighted": (WeightedBag, tokens(20, B, 6)),
    "linear_subclass_named": (lambda: NamedLinear(12, 9), normal(B, 4, 12)),
    "linear_subclass_equalised": (lambda: EqualisedLinear(12, 9), normal(B, 4, 12)),
    "linear_subclass_fused": (lambda: EqualisedLinear(12, 36), normal(B, 4, 12)),
    "linear_subclass_bias": (lambda: SeparateBias(12, 9), normal(B, 4, 12)),
    "linear_subclass_lora": (lambda: LoraLinear(12, 9), normal(B, 4, 12)),
    "positions": (Positions, tokens(20, B, 7)),
    "layer_norm": (lambda: nn.LayerNorm(12), normal(B, 4, 12)),
    "layer_norm_2d": (lambda: nn.LayerNorm((3, 12), bias=False), normal(B, 4, 3, 12)),
    "group_norm": (lambda: nn.GroupNorm(3, 12), normal(B, 12, 4, 5)),
    "instance_norm": (lambda: nn.InstanceNorm2d(12, affine=True), normal(B, 12, 4, 5)),
    "instance_norm_1d": (lambda: nn.InstanceNorm1d(12, affine=True), normal(B, 12, 4)),
    "rms_norm": (lambda: nn.RMSNorm(12), normal(B, 4, 12)),
    "rms_norm_custom": (lambda: RmsNorm(12), normal(B, 4, 12)),
    "rms_norm_transformers": (lambda: LlamaRMSNorm(12), normal(B, 4, 12)),
    "rms_norm_transformers_of_heads": (lambda: Qwen3RMSNorm(12), normal(B, 3, 4, 12)),
    "rms_norm_transformers_of_vectors": (lambda: LlamaRMSNorm(12), normal(B, 12)),
    "prelu": (lambda: nn.PReLU(4), normal(B, 4, 12)),
    "bilinear_free": (Scaled, normal(B, 6)),
    "prefixed": (Prefixed, normal(B, 3, 6)),
    "repeated_and_tied": (Repeated, tokens(20, B, 6)),
    "folded": (Folded, normal(B, 4, 6)),
    "attention": (lambda: Attention(), normal(B, 4, 12)),
    "attention_weights": (lambda: Attention(weights=True), normal(B, 4, 12)),
    "attention_cross": (lambda: Attention(cross=True), normal(B, 4, 12)),
    "attention_extras": (lambda: Attention(add_bias_kv=True, add_zero_attn=True), normal(B, 4, 12)),
    "attention_separate": (lambda: Attention(kdim=8, vdim=10), normal(B, 4, 12)),
    "encoder_layer": (
        lambda: nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True),
        normal(B, 4, 12),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rule_equals_batch_of_one(case: str, method: object) -> None:
    make, batch = CASES[case]
    torch.manual_seed(3)
    model = make().double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        weights = torch.linspace(-1, 2, math.prod(y.shape[1:]), dtype=y.dtype).cos().view(y.shape[1:])
        return ((y * weights).flatten(1).sum(1) ** 2).mean()

    assert_per_sample_gradients(model, method, batch, B, loss)  # type: ignore[arg-type]


class ScaledToOne(LlamaRMSNorm):
    """Its scale is normalised: a scale for each sample, side by side, would mix them."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, hidden_states.shape[-1:]) * (self.weight / self.weight.norm())


class Renamed(LlamaRMSNorm):
    """A name alone changes nothing."""


def test_an_rms_norm_is_known_by_its_code() -> None:
    known, others = (LlamaRMSNorm, Qwen3RMSNorm, Renamed), (GemmaRMSNorm, ScaledToOne, RmsNorm)
    assert all(rule_for(kind(12)) is rms_norm.RMS_NORM for kind in known)
    assert all(rule_for(kind(12)) is fallback.FALLBACK for kind in others)


def test_padding_is_no_part_of_a_bag() -> None:
    for mode in ("sum", "mean", "max"):
        bag = nn.EmbeddingBag(9, 4, mode=mode, padding_idx=0)
        bag.weight.data[0] = 5.0  # its row does not count, whatever is in it
        token = torch.tensor([[0, 0], [0, 2], [3, 3]])
        plain = bag(token)
        attach(bag, DPSGD())
        torch.testing.assert_close(bag(token), plain)


def test_bags_told_apart_by_offsets_are_refused_by_name() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, token: Tensor) -> Tensor:
            return self.bag(token.reshape(-1), torch.arange(0, token.numel(), token.shape[1]))

    class Bags(nn.Module):
        """As Opacus's own tests call it: all indices in one row, of which lsg takes each for a record."""

        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4)

        def forward(self, token: Tensor, offsets: Tensor) -> Tensor:
            return self.bag(token, offsets=offsets)

    for model, inputs in (
        (Flat(), (tokens(9, 6, 2),)),
        (Bags(), (tokens(9, 12), torch.tensor([0, 2, 3, 7, 8]))),
    ):
        attach(model, DPSGD())
        with pytest.raises(PrivacyError, match=r"embedding bag 'bag'.*offsets.*padding_idx"):
            model(*inputs)
        copy.deepcopy(model)(*inputs)  # a copy is an ordinary model


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("at_once", [1, 2000])
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("conv")])
def test_kernel_gradients_of_some_samples_at_a_time(case: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_AT_ONCE", at_once)
    test_rule_equals_batch_of_one(case, DPSGD())


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("conv")])
def test_dense_kernels_by_patches_equal_batch_of_one(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv, "_patches_pay", lambda g, groups: groups == 1)  # as on a GPU
    test_rule_equals_batch_of_one(case, DPSGD())


def test_a_forward_of_the_instances_own_is_what_is_trained() -> None:
    """As wrappers set it: the class does not tell what such a layer computes."""
    layer = nn.Linear(12, 9).double()
    layer.forward = types.MethodType(lambda self, x: F.linear(x, self.weight, self.bias).tanh(), layer)  # type: ignore[method-assign]
    model = nn.Sequential(layer, nn.Linear(9, 4).double())
    x = normal(B, 4, 12)
    wanted = batch_of_one_gradients(model, x, B, lambda model, x: model(x).square().mean())
    engine, *_ = attach(model, DPSGD())
    model(x).square().mean().backward()
    found = engine.per_sample_gradients()
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_casts_of_factors_follow_the_subspace() -> None:
    weight = nn.Parameter(torch.randn(6, 5))
    slot = Slot("weight", weight, Layout(transposed=True))
    space = Subspace(torch.randn(5, 2), torch.randn(2, 6), None, None, transposed=True)
    slot.subspace = space
    before = slot.factors_as(torch.bfloat16)
    space.left.mul_(3)  # as a recorded refresh writes new values
    refresh_casts([slot])
    after = slot.factors_as(torch.bfloat16)
    assert after[1] is before[1] and torch.equal(after[1], space.left.T.to(torch.bfloat16))
    slot.subspace = Subspace(torch.ones(5, 2), torch.ones(2, 6), None, None, transposed=True)
    assert torch.equal(slot.factors_as(torch.bfloat16)[0], torch.ones(6, 2, dtype=torch.bfloat16))
    refresh_casts([slot])
    assert torch.equal(slot.factors_as(torch.bfloat16)[0], torch.ones(6, 2, dtype=torch.bfloat16))
