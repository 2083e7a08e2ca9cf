"""What a private forward keeps for its backward: no more activations than plain training keeps of the same model."""

import weakref

import pytest
import torch
from torch import Tensor, nn

from lsg import DPSGD, LSG
from lsg.bench.contenders import Setting, attach
from lsg.bench.presets import workload
from lsg.bench.shapes import Preset
from lsg.methods import Method
from lsg.parameters.cast_cache import LastCast
from tests.support.reference import assert_per_sample_gradients

CPU = torch.device("cpu")
B, LAYERS, TOKENS, WIDTH = 7, 2, 10, 64  # no size of a weight, a factor or a mask is a multiple of B


def activation_bytes(precision: str, *, private: bool) -> int:
    """Bytes of the storages that a forward saves, each once, weights and subspaces left out."""
    preset = Preset("small", "encoder", width=WIDTH, layers=LAYERS, tokens=TOKENS, micro_batch=B, micro_batches=1)
    setting = Setting(preset, workload(preset, CPU), CPU, precision)
    model = setting.workload.make_model()
    if private:
        optimizer = attach(setting, model, LSG(rank=4, sparsity=0.5), None)[1]
        optimizer.clock.begin_micro_batch(optimizer.clock.enter_epoch(), size=B, last=True)
    (x, y), *_ = setting.workload.batches
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dim() > 0 and tensor.shape[0] % B == 0:
            saved[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no other takes its place
        return tensor

    with setting.autocast():
        model(x)  # the first batch is also checked for samples that mix
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = setting.workload.loss(model, x, y)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_private_forward_saves_no_more_than_a_plain_one(precision: str) -> None:
    plain, private = (activation_bytes(precision, private=private) for private in (False, True))
    # Plain autocast casts the input of queries, keys and values three times in bfloat16.
    shared = 2 * LAYERS * B * TOKENS * WIDTH * 2 if precision == "bf16" else 0
    assert private <= plain - shared


class Siblings(nn.Module):
    """Three layers on one tensor, which is written to before the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.middle, self.right = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).float()
        y = self.left(h) + self.middle(h)
        h.mul_(3.0)
        return y + self.right(h)


@pytest.mark.parametrize("method", [LSG(rank=2, sparsity=0.4), DPSGD()])
def test_layers_that_share_a_cast_have_exact_gradients(method: Method) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().square().mean(1).mean()

    torch.manual_seed(0)
    assert_per_sample_gradients(Siblings(), method, torch.randn(5, 12), 5, loss, tolerance=2e-2)


def test_a_cast_is_shared_and_not_kept_alive() -> None:
    cast, x = LastCast(), torch.randn(3, 4)
    first = cast(x, torch.bfloat16)
    assert cast(x, torch.bfloat16) is first
    assert cast(x, torch.float16).dtype == torch.float16
    second = cast(x, torch.bfloat16)
    x.add_(1.0)
    assert torch.equal(cast(x, torch.bfloat16), x.bfloat16()) and not torch.equal(second, x.bfloat16())
    gone = weakref.ref(second)
    del second
    assert gone() is None
