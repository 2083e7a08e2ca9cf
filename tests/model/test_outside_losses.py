"""Losses computed outside the model: the ones that depend on the whole batch are refused early on."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg import DPSGD, PrivacyError
from lsg.losses import per_sequence, per_token
from lsg.model.outside_losses import LossWatch, refuse_token_mean
from tests.support.reference import attach

B, T, V = 4, 6, 9


def texts(lengths: tuple[int, ...] = (6, 3, 1, 5), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(len(lengths), T, V, generator=generator).to(dtype).requires_grad_()
    y = torch.randint(0, V, z.shape[:2], generator=generator)
    for record, length in zip(y, lengths, strict=True):
        record[length:] = -100
    return z, y


def look(z: Tensor, loss: Tensor) -> None:
    (gradient,) = torch.autograd.grad(loss, z)
    refuse_token_mean(z.detach(), gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mean_over_all_tokens_is_refused(dtype: torch.dtype) -> None:
    z, y = texts(dtype=dtype)
    with pytest.raises(PrivacyError, match=r"lsg\.losses\.per_sequence"):
        look(z, F.cross_entropy(z.flatten(0, 1).float(), y.flatten()))
    with pytest.raises(PrivacyError, match="tokens"):  # of a causal model
        look(z, F.cross_entropy(z[:, :-1].reshape(-1, V).float(), y[:, 1:].reshape(-1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_losses_that_keep_records_apart_are_let_through(dtype: torch.dtype) -> None:
    z, y = texts(dtype=dtype)
    for reduction in ("mean", "sum"):
        look(z, per_sequence(z, y, reduction=reduction))  # type: ignore[arg-type]
        look(z, per_sequence(z, y, shift=True, reduction=reduction))  # type: ignore[arg-type]
        look(z, per_token(z, y, length=6, reduction=reduction))  # type: ignore[arg-type]
    look(z, per_sequence(z, y, label_smoothing=0.1))
    look(z, z.square().mean())
    look(z, z.float().softmax(-1)[..., 0].mean())
    look(z, F.kl_div(z.float().log_softmax(-1), torch.rand(B, T, V).softmax(-1), reduction="batchmean"))
    z, y = texts((6, 6, 6, 6), dtype)
    look(z, F.cross_entropy(z.flatten(0, 1).float(), y.flatten()))  # equally long: it is a mean over records
    z, y = texts((6, 3, 0, 5), dtype)
    look(z, per_sequence(z, y))  # a record without tokens


def test_ignored_records_and_class_weights_are_refused_under_a_mean() -> None:
    z = texts()[0].detach()[:, 0].requires_grad_()
    y, weight = torch.tensor([1, 3, 0, 2]), torch.linspace(0.5, 2, V)
    look(z, F.cross_entropy(z, y))
    look(z, F.cross_entropy(z, y, weight=weight, reduction="none").mean())
    with pytest.raises(PrivacyError, match="class weights"):
        look(z, F.cross_entropy(z, y, weight=weight))
    ignored = torch.tensor([1, -100, 0, 2])
    look(z, F.cross_entropy(z, ignored, reduction="none").mean())
    look(z, F.cross_entropy(z, ignored, reduction="sum"))
    with pytest.raises(PrivacyError, match="have a label"):
        look(z, F.cross_entropy(z, ignored))


def test_tokens_that_are_all_but_sure_do_not_hide_it() -> None:
    z, y = texts()
    z.data.scatter_(-1, y.clamp_min(0)[:, :1].unsqueeze(-1), 12.0)
    with pytest.raises(PrivacyError, match="tokens"):
        look(z, F.cross_entropy(z.flatten(0, 1), y.flatten()))
    look(z, per_sequence(z, y))


def backward(watch: LossWatch, z: Tensor, loss: Any) -> None:
    logits = z * 1
    watch.watch({"logits": logits}, len(z))
    loss(logits).backward()


def test_what_may_be_chance_is_refused_the_second_time() -> None:
    """Sequences of 5 tokens on average, divided by 5."""
    watch = LossWatch()
    z, y = texts((6, 4, 5, 5))
    backward(watch, z, lambda logits: per_token(logits, y, length=5))
    backward(watch, z, lambda logits: F.cross_entropy(logits.flatten(0, 1), y.flatten()))  # cannot be told apart
    z, y = texts((6, 4, 5, 1))
    backward(watch, z, lambda logits: per_token(logits, y, length=5))
    with pytest.raises(PrivacyError, match="tokens"):
        backward(watch, z, lambda logits: F.cross_entropy(logits.flatten(0, 1), y.flatten()))


def test_class_weights_are_refused_the_second_time_whatever_the_size() -> None:
    watch, weight = LossWatch(), torch.linspace(0.5, 2, V)
    z = texts()[0].detach()[:, 0].requires_grad_()
    backward(watch, z, lambda logits: F.cross_entropy(logits, torch.tensor([1, 3, 0, 2]), weight=weight))
    with pytest.raises(PrivacyError, match="class weights"):
        backward(watch, z, lambda logits: F.cross_entropy(logits, torch.tensor([4, 3, 5, 2]), weight=weight))


def test_it_looks_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LossWatch()
    looks = []
    monkeypatch.setattr(watch, "look", lambda *args: looks.append(watch._forwards))
    z, y = texts()
    for _ in range(40):
        backward(watch, z, lambda logits: per_sequence(logits, y))
    assert looks == [1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    with torch.no_grad():
        watch.watch(z * 1, B)
    watch.watch(z[:1] * 1, 1)
    assert watch._forwards == 40


def test_a_private_model_is_watched() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, V)

        def forward(self, x: Tensor) -> Any:
            return {"logits": self.layer(x)}

    model, (_, y) = Model(), texts()
    engine, optimizer, _ = attach(model, DPSGD())
    x = torch.randn(B, T, 3)
    per_sequence(model(x)["logits"], y).backward()
    optimizer.step()
    with pytest.raises(PrivacyError, match="tokens"):
        F.cross_entropy(model(x)["logits"].flatten(0, 1), y.flatten()).backward()
    model.zero_grad()
    engine.detach()
    F.cross_entropy(model(x)["logits"].flatten(0, 1), y.flatten()).backward()


@pytest.mark.parametrize("announced", ["mean", "sum"])
def test_the_other_reduction_is_refused_at_the_second_size(announced: Any) -> None:
    """A record's gradient would depend on how many others there are."""
    other = "sum" if announced == "mean" else "mean"
    watch = LossWatch(announced)

    def train(size: int, reduction: str, factor: float = 1.0) -> None:
        z, y = torch.randn(size, V, requires_grad=True), torch.randint(0, V, (size,))
        backward(watch, z, lambda logits: factor * F.cross_entropy(logits, y, reduction=reduction))

    for size in (4, 6):
        train(size, announced)
        train(size, announced, factor=0.1)
    for _ in range(3):  # a constant factor may look so at one size
        train(4, other)
    with pytest.raises(PrivacyError, match=f"is the {other} over the records .* loss_reduction='{announced}'"):
        train(5, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_that_accelerate_divides_again_is_warned_of_once(dtype: torch.dtype) -> None:
    from accelerate import Accelerator
    from accelerate.state import GradientState

    z, y = texts(dtype=dtype)[0].detach()[:, 0].requires_grad_(), torch.tensor([1, 3, 0, 2])
    try:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        watch = LossWatch()

        def train() -> None:
            watch.watch(out := z * 1.0, B)
            accelerator.backward(F.cross_entropy(out.float(), y))

        train()  # once may be chance
        with pytest.warns(UserWarning, match="gradient_accumulation_steps=4 divides it"):
            train()
        train()  # and no more: warnings are errors here
        other = LossWatch()
        for _ in range(3):  # of losses that nobody divided
            backward(other, z, lambda logits: F.cross_entropy(logits.float(), y))
    finally:
        GradientState._reset_state()
