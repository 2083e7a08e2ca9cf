"""`secure_mode=True`: what it refuses, that nothing repeats in forks and restarts, that lost steps are charged."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lsg import ConfigurationError, PrivacyEngine
from lsg.accounting.ledger import FRESH
from lsg.sampling.random_sources import NoiseSource, TorchNoise
from lsg.sampling.secure_source import SecureNoise
from tests.support.small_run import BATCH, EPOCHS, METHODS, N, Training, stop_at

CPU = torch.device("cpu")
PLANNED = EPOCHS * N // BATCH


def secure(folder: Path | None = None, **options: Any) -> Training:
    engine = {"secure_mode": True} | ({} if folder is None else {"ledger": folder / "ledger"})
    return Training(engine=engine, **{"noise_generator": None} | options)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger").read_text().splitlines()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All noise that secure sources draw."""
    kept: list[Tensor] = []
    original = SecureNoise.normal

    def spy(self: SecureNoise, *args: Any) -> Tensor:
        kept.append(original(self, *args))
        return kept[-1]

    monkeypatch.setattr(SecureNoise, "normal", spy)
    return kept


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns, or the error it raises as text, in a forked copy of this process."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forks of processes with threads
        child = os.fork()
    if child == 0:
        try:
            answer = json.dumps(work())
        except BaseException as error:
            answer = json.dumps(f"{type(error).__name__}: {error}")
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer)


def numbers(source: NoiseSource) -> list[Any]:
    return [
        source.normal(4, CPU, torch.float32).tolist(),
        source.uniform(4).tolist(),
        source.permutation(20).tolist(),
    ]


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_trains_with_every_method_at_the_same_epsilon(method: str) -> None:
    one, other, plain = secure(method=method).finish(), secure(method=method).finish(), Training(method).finish()
    assert one.engine.secure_mode and not plain.engine.secure_mode
    assert one.engine.accountant.history == other.engine.accountant.history == plain.engine.accountant.history


def test_seeds_do_not_make_it_repeat(drawn: list[Tensor]) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        secure().finish()
    half = len(drawn) // 2
    assert half == PLANNED
    assert not any(torch.equal(one, other) for one, other in zip(drawn[:half], drawn[half:], strict=True))


def test_generators_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="noise_generator"):
        secure(noise_generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(3, 2)
    loader = DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=4, generator=torch.Generator())
    with pytest.raises(ConfigurationError, match="data_loader has a generator"):
        PrivacyEngine(secure_mode=True).make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'lsg-dp\[secure\]'"):
        PrivacyEngine(secure_mode=True)
    PrivacyEngine()


# --- forks -----------------------------------------------------------------------------------------------------------


def test_a_fork_draws_numbers_of_its_own() -> None:
    source = SecureNoise()
    numbers(source)
    theirs, ours = in_a_fork(lambda: numbers(source)), numbers(source)
    assert all(one != other for one, other in zip(theirs, ours, strict=True))


def test_a_fork_of_a_stream_seeded_by_the_system_is_stopped() -> None:
    source = TorchNoise.fresh(CPU)
    for draw in (
        lambda: numbers(source)[0],
        lambda: source.uniform(3).tolist(),
        lambda: source.permutation(3).tolist(),
    ):
        assert in_a_fork(draw).startswith("PrivacyError: this process was forked after make_private")
    assert len(numbers(source)) == 3

    def renewed() -> list[Any]:
        source.renew()
        return numbers(source)

    assert in_a_fork(renewed) != numbers(source)


def test_a_stream_seeded_by_the_user_repeats_as_asked() -> None:
    source = TorchNoise(torch.Generator().manual_seed(0))
    assert in_a_fork(lambda: numbers(source)) == numbers(source)
    seeded = TorchNoise(torch.Generator())
    seeded.renew()  # it is the system's from here on
    assert in_a_fork(lambda: numbers(seeded)).startswith("PrivacyError")


def one_step(training: Training) -> list[float]:
    """Of a run without an epoch under way, on data that say nothing."""
    training.model(torch.zeros(2, 10)).sum().backward()
    training.optimizer.step()
    return [float(p.detach().sum()) for p in training.model.parameters()]


def test_a_forked_engine_does_not_repeat_the_noise_of_the_first() -> None:
    plain = Training(noise_generator=None)
    assert in_a_fork(lambda: one_step(plain)).startswith("PrivacyError")
    one_step(plain)
    cipher = secure()
    assert in_a_fork(lambda: one_step(cipher)) != one_step(cipher)


@pytest.mark.parametrize("secure_mode", [False, True])
def test_forked_workers_of_a_loader_are_not_affected(secure_mode: bool) -> None:
    training = Training(engine={"secure_mode": secure_mode}, noise_generator=None)
    model = torch.nn.Linear(3, 2)
    engine = PrivacyEngine(accountant="rdp", secure_mode=secure_mode)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.zeros(8, 3)), batch_size=4, num_workers=2, multiprocessing_context="fork"
        ),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
    assert len(engine.accountant) == 2 and len(training.engine.accountant) == 0


# --- continuation ----------------------------------------------------------------------------------------------------


def test_saving_needs_a_ledger(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ledger"):
        secure().save(tmp_path / "run.ckpt")
    assert not (tmp_path / "run.ckpt").exists()


def test_a_state_holds_no_stream_of_noise_or_samples(tmp_path: Path) -> None:
    training = secure(tmp_path)
    stop_at(training, "logical steps")
    state = training.engine.state_dict()
    assert state["noise"] is None and state["sampling"] is None and state["books"]["stream"] == FRESH


@pytest.mark.parametrize("where", ["epochs", "logical steps", "micro-batches"])
def test_with_nothing_lost_the_planned_steps_are_taken(where: str, tmp_path: Path, drawn: list[Tensor]) -> None:
    training = secure(tmp_path)
    stop_at(training, where)
    training.save(tmp_path / "run.ckpt")
    taken, before = len(lines(tmp_path)), [tensor.clone() for tensor in drawn]
    continued = secure(tmp_path).load(tmp_path / "run.ckpt").finish()
    assert len(continued.engine.accountant) == len(lines(tmp_path)) == PLANNED
    assert len(drawn) == PLANNED and taken == len(before)
    flat = [tuple(tensor[:5].tolist()) for tensor in drawn]
    assert len(set(flat)) == PLANNED


def test_lost_steps_are_charged_and_no_noise_comes_twice(tmp_path: Path, drawn: list[Tensor]) -> None:
    training = secure(tmp_path)
    stop_at(training, "micro-batches")
    training.save(tmp_path / "run.ckpt")
    saved = len(training.engine.accountant)
    for _ in range(7):
        next(training.loop)
    recorded = len(lines(tmp_path))
    assert recorded > saved
    continued = secure(tmp_path).load(tmp_path / "run.ckpt")
    assert len(continued.engine.accountant) == recorded
    assert continued.optimizer.clock.position().partial_sum is None  # its batch cannot be drawn again
    continued.finish()
    assert len(continued.engine.accountant) == len(lines(tmp_path)) == PLANNED + recorded - saved == len(drawn)
    assert continued.engine.get_epsilon(1e-3) > Training().finish().engine.get_epsilon(1e-3)
    assert len({tuple(tensor[:5].tolist()) for tensor in drawn}) == len(drawn)


def test_a_shuffled_epoch_that_is_continued_counts_twice(tmp_path: Path) -> None:
    """Its order is new, so that a record may come again."""
    training = secure(tmp_path, poisson_sampling=False)
    stop_at(training, "logical steps")
    training.save(tmp_path / "run.ckpt")
    continued = secure(tmp_path, poisson_sampling=False).load(tmp_path / "run.ckpt").finish()
    assert len(continued.engine.accountant) == EPOCHS + 1


def test_a_run_stays_secure_or_plain(tmp_path: Path) -> None:
    training = secure(tmp_path)
    training.save(tmp_path / "secure.ckpt")
    plain = Training(engine={"ledger": tmp_path / "ledger"})
    plain.save(tmp_path / "plain.ckpt")
    with pytest.raises(ConfigurationError, match="secure_mode=True, but this engine was made without"):
        plain.load(tmp_path / "secure.ckpt")
    with pytest.raises(ConfigurationError, match="secure_mode=False, but this engine has secure_mode=True"):
        training.load(tmp_path / "plain.ckpt")


def test_a_plain_run_loaded_in_a_fork_goes_on(tmp_path: Path) -> None:
    """Loading is the way to continue a run in another process: the stream is the new one's then."""
    training = Training(noise_generator=None)
    training.save(tmp_path / "run.ckpt")
    assert in_a_fork(lambda: one_step(Training(noise_generator=None).load(tmp_path / "run.ckpt"))) == one_step(training)
