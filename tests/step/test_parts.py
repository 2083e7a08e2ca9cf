"""A step taken a part of the parameters at a time: the same to the bit, in memory that does not grow with the model."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, LSG, PrivacyEngine
from lsg.methods import Method
from lsg.step import optimizer as step_module
from lsg.step import parts
from lsg.step.parts import _ONE_BY_ONE, steps_in_parts
from tests.support.live_bytes import LiveBytes

WIDTH, STEPS = 16, 3


class Fused(nn.Module):
    """Attention whose packed weight is three slots of different stacks, a convolution, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.mT).mT
        return self.head(self.norm(self.attention(h, h, h, need_weights=False)[0]))


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many bytes a part has; every model is large then."""

    def set_size(size: int) -> None:
        monkeypatch.setattr(parts, "_ALL_AT_ONCE_BYTES", 0)
        monkeypatch.setattr(step_module, "PART_BYTES", size)

    return set_size


def private(model: nn.Module, optimizer: optim.Optimizer, method: Method, **options: Any) -> Any:
    settings: dict[str, Any] = {"noise_multiplier": 0.7, "max_grad_norm": 1.0, "poisson_sampling": False}
    data = DataLoader(TensorDataset(torch.zeros(8, 1)), batch_size=4)
    noise = torch.Generator().manual_seed(1)
    made = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=optimizer, data_loader=data, method=method, noise_generator=noise, **settings | options
    )
    return made[1]


def run(kind: Any, method: Method, *, dtype: torch.dtype = torch.float32, **options: Any) -> list[Tensor]:
    """Weights after some steps with two parameter groups and a schedule, and what the optimizer remembers."""
    torch.manual_seed(0)
    model = Fused().to(dtype)
    groups = [{"params": model.attention.parameters(), "lr": 0.02}, {"params": [*model.conv.parameters()]}]
    rest = {"params": [*model.norm.parameters(), *model.head.parameters()], "lr": 0.01}
    optimizer = kind([*groups, rest], lr=0.05, **options)
    wrapped = private(model, optimizer, method)
    schedule = LambdaLR(wrapped, lambda step: 0.9**step)
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(5)).to(dtype)
    for _ in range(STEPS):
        model(x).square().mean((1, 2)).mean().backward()
        wrapped.step()
        schedule.step()
        wrapped.zero_grad()
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    numbers = [torch.as_tensor(value) for state in states for value in state.values() if value is not None]
    return [*(p.detach() for p in model.parameters()), *numbers]


FAST = [(kind, {"fused": True}) for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)]
LOOPS = [
    (kind, {"foreach": foreach}) for kind in _ONE_BY_ONE for foreach in (True, False) if kind is not optim.Adafactor
]


@pytest.mark.parametrize(("kind", "options"), [*FAST, *LOOPS, (optim.Adafactor, {}), (optim.SGD, {"momentum": 0.9})])
def test_every_known_optimizer_takes_the_same_step_in_parts(kind: Any, options: Any, in_parts: Any) -> None:
    method = LSG(rank=2, sparsity=0.4)
    whole = run(kind, method, **options)
    for size in (1, 1000):  # one parameter at a time; a few
        in_parts(size)
        apart = run(kind, method, **options)
        assert len(whole) == len(apart) and all(torch.equal(a, b) for a, b in zip(whole, apart, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "method",
    [LSG(rank=2, sparsity=0.4, fused_qkv="split"), LSG(rank=2, sparsity=0.5, importance="direct"), DPSGD()],
    ids=str,
)
def test_fused_weights_and_every_method_take_the_same_step_in_parts(
    method: Method, dtype: torch.dtype, in_parts: Any
) -> None:
    whole = run(optim.AdamW, method, dtype=dtype)
    in_parts(1)
    assert all(torch.equal(a, b) for a, b in zip(whole, run(optim.AdamW, method, dtype=dtype), strict=True))


def one_step(model: nn.Module, wrapped: Any) -> None:
    model(torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(5))).square().mean((1, 2)).mean().backward()
    wrapped.step()


def test_gradients_are_gone_after_a_step_in_parts_and_there_after_a_whole_one(in_parts: Any) -> None:
    model = Fused()
    wrapped = private(model, optim.AdamW(model.parameters()), LSG(rank=2))
    one_step(model, wrapped)
    assert all(p.grad is not None for p in model.parameters())
    in_parts(1)
    one_step(model, wrapped)
    assert all(p.grad is None for p in model.parameters())


def watched(how: str, optimizer: optim.Optimizer, seen: list[int]) -> Any:
    """Somebody who looks at steps, and sees all gradients at once."""

    def look(*_: Any) -> None:
        seen.append(sum(p.grad is not None for group in optimizer.param_groups for p in group["params"]))

    if how == "pre hook":
        return optimizer.register_step_pre_hook(look)
    if how == "post hook":
        return optimizer.register_step_post_hook(look)
    if how == "global hook":
        return register_optimizer_step_post_hook(look)
    own = optimizer.step

    def step(*arguments: Any) -> None:
        look()
        own(*arguments)

    optimizer.step = step  # type: ignore[method-assign]
    return None


@pytest.mark.parametrize("how", ["pre hook", "post hook", "global hook", "replaced step"])
def test_who_watches_steps_sees_one_and_all_its_gradients(how: str, in_parts: Any) -> None:
    in_parts(1)
    model = Fused()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen: list[int] = []
    handle = watched(how, optimizer, seen)
    try:
        one_step(model, private(model, optimizer, LSG(rank=2)))
    finally:
        if handle is not None:
            handle.remove()
    assert seen == [len(list(model.parameters()))]


class Coupled(optim.SGD):
    """As a user writes one: each parameter moves by the largest gradient of all."""


def test_an_unknown_optimizer_is_never_given_parts(in_parts: Any) -> None:
    in_parts(1)
    model = Fused()
    trained = list(model.parameters())
    assert steps_in_parts(optim.SGD(trained, lr=0.1), trained)
    assert not steps_in_parts(Coupled(trained, lr=0.1), trained)
    assert not steps_in_parts(optim.LBFGS(trained), trained)


def test_a_small_model_has_its_step_as_a_whole() -> None:
    trained = list(Fused().parameters())
    assert not steps_in_parts(optim.AdamW(trained), trained)


def test_a_schedule_on_the_wrapped_optimizer_counts_steps_and_not_parts(in_parts: Any) -> None:
    in_parts(1)
    model = Fused()
    optimizer = optim.AdamW(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    wrapped = private(model, optimizer, LSG(rank=2))
    assert steps_in_parts(optimizer, list(model.parameters()))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lr_scheduler.*")
        for _ in range(2):
            one_step(model, wrapped)
            schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_an_error_between_parts_leaves_no_gradient_for_the_next_step(in_parts: Any) -> None:
    """A step that fails half-way was accounted for, and what comes next is a step of its own."""
    in_parts(1)
    model = Fused()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    wrapped = private(model, optimizer, LSG(rank=2))
    calls = []

    def failing(self: Any, *arguments: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("out of memory")

    own, optim.SGD.step = optim.SGD.step, failing  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            one_step(model, wrapped)
    finally:
        optim.SGD.step = own  # type: ignore[method-assign]
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    wrapped.zero_grad()
    one_step(model, wrapped)
    assert all(p.grad is None for p in model.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_step_is_a_part_and_not_the_model(
    dtype: torch.dtype, in_parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    width, peaks = 256, {}
    one = width * width * 4  # bytes of a weight in float32
    in_parts(one)
    monkeypatch.setattr("lsg.parameters.matrix_chunks.CHUNK_BYTES", one)
    for layers in (4, 24):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(dtype)
        optimizer = optim.SGD(model.parameters(), lr=0.1, foreach=False)
        wrapped = private(model, optimizer, LSG(rank=1, sparsity=0.9))
        model(torch.randn(2, width).to(dtype)).float().square().mean(1).mean().backward()
        with LiveBytes() as live:
            wrapped.step()
        peaks[layers] = live.peak
    # A chunk that is lifted, the part that is stepped on, and the next one's copy; beside them the noisy factors.
    factors = 8 * 24 * 2 * width
    assert peaks[4] <= peaks[24] <= 4 * one + 8 * factors < 24 * one / 2
