"""Compilation is chosen where it pays, once, between two logical steps; never where the run's length is unknown."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PerfConfig, PrivacyEngine
from lsg.speed import compile_choice
from lsg.speed.compile_choice import CompileChoice, saving
from tests.support.tapes import AgainTape, KernelTape, use_tape


def test_it_pays_where_it_saves_twice_its_time() -> None:
    assert saving(1.0, 1000) is None  # a quarter of an hour
    assert saving(1.0, 3600) == pytest.approx(540)
    assert saving(0.01, 3600) is None


def test_the_choice_is_made_once_from_steps_past_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(compile_choice.time, "perf_counter", lambda: now[0])
    waited = []
    choice = CompileChoice(5000, lambda: waited.append(now[0]))
    told = []
    for step in range(60):
        for _ in range(3):  # micro-batches
            told.append((step, choice.step_begins(step)))
        now[0] += 100.0 if step < 10 else 2.0  # the first ones record
    assert [(step, saved) for step, saved in told if saved is not None] == [(20, pytest.approx(0.15 * 2.0 * 4980))]
    assert len(waited) == 2


def make(perf: PerfConfig, *, epsilon: bool = True) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    engine = PrivacyEngine(accountant="rdp")
    given: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "data_loader": DataLoader(
            TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,))),
            batch_size=8,
            generator=torch.Generator().manual_seed(1),
        ),
        "max_grad_norm": 1.0,
        "method": DPSGD(),
        "noise_generator": torch.Generator().manual_seed(2),
        "perf": perf,
    }
    if epsilon:
        made = engine.make_private_with_epsilon(**given, target_epsilon=8.0, target_delta=1e-3, epochs=6)
    else:
        made = engine.make_private(**given, noise_multiplier=1.0)
    return engine, *made


def train(perf: PerfConfig, *, epsilon: bool = True) -> Tensor:
    _, model, optimizer, loader = make(perf, epsilon=epsilon)
    for _ in range(6):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled. CPUs record, and whatever takes any time is worth compiling."""
    use_tape(monkeypatch, KernelTape)
    monkeypatch.setattr(compile_choice, "saving", lambda seconds, steps: 1000.0 if steps > 0 else None)
    found: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda forward: found.append(forward) or forward)
    return found


def test_a_long_run_is_compiled_midway_and_trains_the_same(
    compiled: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = train(PerfConfig(compile=False, cuda_graphs=False))
    assert not compiled
    AgainTape.replays = 0
    found = train(PerfConfig())
    assert len(compiled) == 1 and AgainTape.replays
    assert capsys.readouterr().err.count("lsg: compiling the model, which takes about 120 s and saves about") == 1
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_nothing_is_compiled_where_it_was_refused_or_steps_are_unknown(compiled: list[Any]) -> None:
    train(PerfConfig(compile=False))
    train(PerfConfig(cuda_graphs=False))
    train(PerfConfig(), epsilon=False)
    assert not compiled


def test_without_a_gpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_choice, "saving", lambda seconds, steps: 1000.0)
    monkeypatch.setattr(torch, "compile", lambda forward: pytest.fail("compiled"))
    train(PerfConfig())


def test_a_model_that_cannot_be_compiled_goes_on_as_it_was(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(forward: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", lambda forward: partial(fails, forward))
    wanted = train(PerfConfig(compile=False))
    with pytest.warns(UserWarning, match=r"cannot be compiled, and goes on without \(no compiler here\)"):
        found = train(PerfConfig())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
