"""Losses that keep records apart, against a batch of one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lsg import DPSGD, ConfigurationError, losses
from lsg.losses import per_sequence, per_token
from tests.support.live_bytes import LiveBytes
from tests.support.reference import attach, batch_of_one_gradients

B, T, V = 5, 7, 11


def texts() -> tuple[Tensor, Tensor]:
    """Logits, and labels of sequences with 7, 5, 3, 1 and no tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, V, (B, T), generator=generator)
    for i in range(B):
        labels[i, max(0, T - 2 * i) :] = -100
    labels[4] = -100
    return logits.requires_grad_(), labels


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_each_sequence_is_what_torch_computes_for_it_alone(shift: bool, smoothing: float) -> None:
    logits, labels = texts()
    losses = per_sequence(logits, labels, shift=shift, label_smoothing=smoothing, reduction="none")
    for i in range(B):
        z, y = (logits[i, :-1], labels[i, 1:]) if shift else (logits[i], labels[i])
        alone = F.cross_entropy(z, y, label_smoothing=smoothing)
        torch.testing.assert_close(losses[i], alone if (y != -100).any() else torch.zeros_like(alone))
    mean = per_sequence(logits, labels, shift=shift, label_smoothing=smoothing)
    torch.testing.assert_close(mean, losses.sum() / B)  # one without tokens still counts in the divisor


@pytest.mark.parametrize("at_once", [1, 5 * V * 8])  # a token at a time; five, and what is left
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_large_vocabulary_in_parts_is_the_same_to_the_bit(
    dtype: torch.dtype, smoothing: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, labels = texts()
    found = []
    for size in (losses._AT_ONCE_BYTES, at_once):
        monkeypatch.setattr(losses, "_AT_ONCE_BYTES", size)
        z = logits.detach().to(dtype).requires_grad_()
        value = per_sequence(z, labels, shift=True, label_smoothing=smoothing)
        found.append((value, torch.autograd.grad(value, z)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_large_vocabulary_has_second_derivatives_and_goes_through_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_AT_ONCE_BYTES", 1)
    logits, labels = texts()
    assert torch.autograd.gradgradcheck(lambda z: per_sequence(z, labels[:2]), logits[:2])
    one = torch.vmap(lambda z, y: per_sequence(z[None], y[None]))(logits, labels)
    torch.testing.assert_close(one, per_sequence(logits, labels, reduction="none"))


def test_memory_of_a_large_vocabulary_is_the_gradient_and_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, vocabulary = 64, 1000
    monkeypatch.setattr(losses, "_AT_ONCE_BYTES", 4 * vocabulary * 2)
    logits = torch.randn(4, tokens // 4, vocabulary).bfloat16().requires_grad_()
    labels = torch.randint(0, vocabulary, (4, tokens // 4))
    with LiveBytes() as live:
        per_sequence(logits, labels).backward()
    gradient, a_part = 2 * tokens * vocabulary, 2 * 4 * vocabulary
    assert gradient <= live.peak <= gradient + 5 * a_part + 40 * tokens


def test_reductions() -> None:
    logits, labels = texts()
    losses = per_sequence(logits, labels, reduction="none")
    torch.testing.assert_close(per_sequence(logits, labels, reduction="sum"), losses.sum())
    with pytest.raises(ConfigurationError, match="reduction='max'"):
        per_sequence(logits, labels, reduction="max")  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", [per_sequence, lambda *a: per_token(*a, length=8)])
def test_a_record_does_not_change_the_gradient_of_another(loss) -> None:
    """The gradient that a record gets is the same whatever the others' lengths are."""
    logits, labels = texts()
    others = labels.clone()
    others[1:] = -100
    others[1:, 0] = 3
    for y in (labels, others):
        (gradient,) = torch.autograd.grad(loss(logits, y), logits)
        alone = torch.autograd.grad(loss(logits[:1], y[:1]), logits)[0][0] / B
        torch.testing.assert_close(gradient[0], alone)
        assert gradient[y == -100].eq(0).all()


def test_tokens_count_alike_over_a_fixed_length() -> None:
    logits, labels = texts()
    token = F.cross_entropy(logits.mT, labels, reduction="none")
    torch.testing.assert_close(per_token(logits, labels, length=8), token.sum() / (8 * B))
    with pytest.raises(ConfigurationError, match="length=0"):
        per_token(logits, labels, length=0)


def test_one_label_a_record_and_shapes() -> None:
    logits, labels = texts()
    one = labels[:, 0]
    wanted = F.cross_entropy(logits[:, 0], one, reduction="none").mean()
    torch.testing.assert_close(per_sequence(logits[:, 0], one), wanted)
    with pytest.raises(ConfigurationError, match=r"\(5, 7, 11\).*\(5, 6\)"):
        per_sequence(logits, labels[:, :6])


def test_half_precision_logits_give_a_float32_loss() -> None:
    logits, labels = texts()
    half = logits.detach().bfloat16()
    loss = per_sequence(half, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, per_sequence(half.float(), labels))


def test_per_sample_gradients_are_those_of_a_batch_of_one() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, V).double()
    _, labels = texts()
    x = torch.randn(B, T, 4, dtype=torch.float64)
    engine, _, _ = attach(model, DPSGD())
    per_sequence(model(x), labels).backward()
    got = engine.per_sample_gradients()
    wanted = batch_of_one_gradients(model, (x, labels), B, lambda m, batch: per_sequence(m(batch[0]), batch[1]))
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient)
