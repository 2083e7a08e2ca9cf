"""The ledger: every step is on disk before its noise; what a crash took is repeated or charged; changes are noticed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import lsg
from lsg import BudgetExceeded, ConfigurationError, PrivacyEngine, PrivacyError
from lsg.accounting import create_accountant, epsilon_of
from lsg.accounting.ledger import FRESH, Ledger, fingerprint, seal
from lsg.accounting.phases import Phase
from lsg.accounting.step_accounting import Target
from tests.support.small_run import BATCH, UNITS, N, Training, network, stop_at
from tests.support.soak import soak

RATE, SIGMA = BATCH / N, 0.8


def run(folder: Path, **options: Any) -> Training:
    torch.manual_seed(1)
    return Training(engine={"ledger": folder / "ledger"}, **options)


def crashed(folder: Path, batches: int = 6, **options: Any) -> Training:
    """A run that saved a checkpoint in the second epoch and went on for some batches, which are lost."""
    training = run(folder, **options)
    stop_at(training, "micro-batches")
    training.save(folder / "run.ckpt")
    for _ in range(batches):
        next(training.loop)
    return training


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "ledger").read_text().splitlines()]


def test_every_step_is_written_down_with_what_it_spends(tmp_path: Path) -> None:
    training = run(tmp_path, batch_size=1).finish()  # most draws are empty
    steps = len(training.engine.accountant)
    entries = lines(tmp_path)
    assert [entry["step"] for entry in entries] == list(range(1, steps + 1))
    assert {(entry["noise_multiplier"], entry["sample_rate"]) for entry in entries} == {(SIGMA, 1 / N)}
    assert len({entry["weights"] for entry in entries}) == steps and len({entry["stream"] for entry in entries}) == 1
    ledger = create_accountant("rdp")
    ledger.history = Ledger(tmp_path / "ledger").history()
    assert ledger.get_epsilon(1e-3) == training.engine.get_epsilon(1e-3)


def test_a_step_is_on_disk_before_its_noise_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CrashError(Exception):
        pass

    def crash(*args: object) -> None:
        assert len(lines(tmp_path)) == 1
        raise CrashError

    monkeypatch.setattr("lsg.step.gradients.add_noise", crash)
    with pytest.raises(CrashError):
        run(tmp_path).finish()


def test_ledgers_and_checkpoints_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run(tmp_path).finish().save(tmp_path / "run.safetensors")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.iterdir())] == [0o600, 0o600]


@pytest.mark.parametrize("poisson", [True, False])
def test_lost_steps_are_repeated_and_not_counted_twice(poisson: bool, tmp_path: Path) -> None:
    whole_folder, folder = tmp_path / "whole", tmp_path / "crashed"
    whole_folder.mkdir(), folder.mkdir()
    whole = run(whole_folder, poisson_sampling=poisson).finish()
    crashed(folder, 9, poisson_sampling=poisson)
    before = (folder / "ledger").read_bytes()
    continued = run(folder, seed=9, poisson_sampling=poisson).load(folder / "run.ckpt")
    while continued.loader.epoch < 2:
        next(continued.loop)
        continued.save(folder / "run.ckpt")  # also while steps are being repeated
        assert (folder / "ledger").read_bytes().startswith(before)
    again = run(folder, seed=8, poisson_sampling=poisson).load(folder / "run.ckpt").finish()
    assert again.trace == whole.trace
    assert len(lines(folder)) == len(lines(whole_folder)) == len(whole.engine.accountant)
    assert again.engine.accountant.history == whole.engine.accountant.history


def test_without_replay_lost_steps_are_charged_and_all_is_new(tmp_path: Path) -> None:
    lost = crashed(tmp_path)
    recorded = len(lines(tmp_path))
    saved = Training()  # tells how far the checkpoint was
    with pytest.raises(ConfigurationError, match="keeps a ledger"):
        saved.load(tmp_path / "run.ckpt")
    continued = run(tmp_path).load(tmp_path / "run.ckpt", replay=False)
    assert len(continued.engine.accountant) == recorded
    position = continued.optimizer.clock.position()
    assert position.micro == 0 and position.partial_sum is None  # the batch under way is drawn anew
    seen = len(continued.trace)
    continued.finish()
    assert continued.trace[seen : seen + 6] != lost.trace[seen : seen + 6]
    assert len(lines(tmp_path)) == len(continued.engine.accountant) == recorded + (18 - 6 - position.logical)
    assert len({entry["stream"] for entry in lines(tmp_path)}) == 2


def test_noise_that_cannot_be_drawn_again_is_charged(tmp_path: Path) -> None:
    def fresh() -> Training:
        training = run(tmp_path)
        training.engine.run.step_accounting._stream = FRESH
        return training

    training = fresh()
    stop_at(training, "logical steps")
    training.save(tmp_path / "run.ckpt")
    nothing_lost = fresh().load(tmp_path / "run.ckpt")
    assert len(nothing_lost.engine.accountant) == len(lines(tmp_path))
    spent = len(training.engine.accountant)
    for _ in range(6):
        next(training.loop)
    lost = len(lines(tmp_path)) - spent
    assert lost > 0
    continued = fresh().load(tmp_path / "run.ckpt")
    assert len(continued.engine.accountant) == spent + lost
    with open(tmp_path / "ledger", "ab") as file:
        file.write(b'{"step": 12, "noi')  # and a crash in the middle of a line
    continued = fresh().load(tmp_path / "run.ckpt")
    assert len(continued.engine.accountant) == len(lines(tmp_path)) == spent + lost + 1


def test_steps_of_several_continuations_are_charged(tmp_path: Path) -> None:
    """A checkpoint is loaded, continued with new noise, lost, and loaded again: its ledger has both ways on it."""
    crashed(tmp_path)
    other = run(tmp_path).load(tmp_path / "run.ckpt", replay=False)
    for _ in range(5):
        next(other.loop)
    again = run(tmp_path).load(tmp_path / "run.ckpt")
    assert len(again.engine.accountant) == len(lines(tmp_path))


@pytest.mark.parametrize("torn", [b"{", b'{"step": 9, "noise_multiplier": 0.8, "sam', b"\0" * 50, b"garbage\n"])
def test_a_line_cut_off_by_a_crash_is_repeated(torn: bytes, tmp_path: Path) -> None:
    whole_folder, folder = tmp_path / "whole", tmp_path / "crashed"
    whole_folder.mkdir(), folder.mkdir()
    whole = run(whole_folder).finish()
    crashed(folder)
    with open(folder / "ledger", "ab") as file:
        file.write(torn)
    assert run(folder).load(folder / "run.ckpt").finish().trace == whole.trace
    assert len(lines(folder)) == len(lines(whole_folder))


CHANGES: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "less noise": (lambda rows: [rows[0].replace("0.8", "0.9"), *rows[1:]], "line 1 does not fit"),
    "a line less": (lambda rows: rows[:1] + rows[2:], "line 2 does not fit"),
    "lines swapped": (lambda rows: [rows[1], rows[0], *rows[2:]], "line 1 does not fit"),
    "the beginning cut": (lambda rows: rows[3:], "line 1 does not fit"),
    "the end cut": (lambda rows: rows[:4], "cut: it has 4 whole steps"),
    "all gone": (lambda rows: [], "cut: it has 0 whole steps"),
    "rubbish": (lambda rows: ["[]", *rows], "line 1 does not fit"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_ledger_is_refused_by_name(change: str, tmp_path: Path) -> None:
    crashed(tmp_path)
    edit, message = CHANGES[change]
    rows = edit((tmp_path / "ledger").read_text().splitlines())
    (tmp_path / "ledger").write_text("".join(row + "\n" for row in rows))
    other = run(tmp_path)
    before = other.result()
    with pytest.raises(PrivacyError, match=f"run.ckpt.*ledger.*{message}"):
        other.load(tmp_path / "run.ckpt")
    assert other.result() == before


def test_another_runs_ledger_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        crashed(tmp_path / name)
    with pytest.raises(PrivacyError, match="another run's"):
        run(tmp_path / "b").load(tmp_path / "a" / "run.ckpt")
    with pytest.raises(PrivacyError, match="steps of an earlier run: continue that run with load_checkpoint"):
        run(tmp_path / "a").finish()
    plain = Training()
    plain.save(tmp_path / "plain.ckpt")
    with pytest.raises(PrivacyError, match="keeps no ledger"):
        run(tmp_path / "a").load(tmp_path / "plain.ckpt")
    (tmp_path / "c").mkdir()
    assert len(run(tmp_path / "c").load(tmp_path / "plain.ckpt").finish().engine.accountant) == len(
        lines(tmp_path / "c")
    )


@pytest.mark.parametrize("history", [[], [[SIGMA, RATE, 3]], [[5.0, RATE, 30]]])
def test_a_state_that_claims_less_than_its_ledger_is_refused(history: list[Any], tmp_path: Path) -> None:
    training = crashed(tmp_path)
    state = training.engine.state_dict()
    state["books"]["accountant"]["history"] = history
    with pytest.raises(PrivacyError, match="claims less than its ledger"):
        run(tmp_path).engine.load_state_dict(state)


def test_noise_is_not_repeated_on_other_data(tmp_path: Path) -> None:
    """A record that changed meanwhile: the very step that it enters is refused, before its noise is drawn."""
    training = crashed(tmp_path, 8)
    drawn = training.optimizer.gradients.noise.state()
    continued = run(tmp_path).load(tmp_path / "run.ckpt")
    inputs = continued.loader.dataset.tensors[0]
    inputs.copy_(inputs.flip(0))
    with pytest.raises(PrivacyError, match="'sum' is not what was recorded"):
        continued.finish()
    assert not torch.equal(continued.optimizer.gradients.noise.state(), drawn)


def test_a_seal_needs_the_noise_to_be_checked() -> None:
    total, states = torch.randn(9), [torch.Generator().manual_seed(seed).get_state() for seed in (0, 1)]
    assert seal(total, states[0]) == seal(total.clone(), states[0])
    assert (
        len({seal(total, states[0]), seal(total, states[1]), seal(total + 1e-6, states[0]), seal(None, states[0])}) == 4
    )
    assert seal(total, None) == ""


def test_a_repetition_that_differs_is_refused(tmp_path: Path) -> None:
    """Another learning rate: the same noise would cover another sum."""
    crashed(tmp_path, 8)
    continued = run(tmp_path).load(tmp_path / "run.ckpt")
    continued.optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(PrivacyError, match="'weights' is not what was recorded"):
        continued.finish()
    with pytest.raises(PrivacyError, match="replay=False"):
        continued.optimizer.step()
    other = run(tmp_path).load(tmp_path / "run.ckpt")
    other.optimizer.noise_multiplier = 0.9
    with pytest.raises(PrivacyError, match="'noise_multiplier' is not"):
        other.finish()


def test_a_ledger_serves_one_process(tmp_path: Path) -> None:
    training = crashed(tmp_path)
    run(tmp_path).load(tmp_path / "run.ckpt").finish()
    with pytest.raises(PrivacyError, match="written by another process"):
        training.finish()


def test_a_full_disk_stops_the_step_and_leaves_the_ledger_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = crashed(tmp_path)
    before, spent = (tmp_path / "ledger").read_bytes(), len(training.engine.accountant)
    write = os.write

    def half(file: int, content: bytes) -> int:
        return write(file, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match=r"ledger.*no space"):
        training.finish()
    assert (tmp_path / "ledger").read_bytes() == before and len(training.engine.accountant) == spent
    with pytest.raises(ConfigurationError, match="no folder"):
        PrivacyEngine(ledger=tmp_path / "nowhere" / "ledger")


def test_the_fingerprint_sees_every_bit() -> None:
    weights = [torch.randn(3, 4), torch.randn(5).bfloat16(), torch.randn(2, 2).double(), torch.randn(4, 3).T]
    known = fingerprint(weights)
    assert fingerprint([w.clone() for w in weights]) == known
    for number in range(len(weights)):
        changed = [w.clone() for w in weights]
        changed[number][0] *= 1 + torch.finfo(changed[number].dtype).eps
        assert fingerprint(changed) != known


@pytest.mark.parametrize("options", [{}, UNITS], ids=["records", "units"])
def test_kills_at_random_moments_change_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    assert soak(tmp_path, kills=10, **options)["kills"] >= 10


# --- the target -------------------------------------------------------------------------------------------------------


def with_target(epochs: int, *, accountant: str = "rdp", poisson: bool = True) -> tuple[PrivacyEngine, Any, Any, Any]:
    engine, model = PrivacyEngine(accountant=accountant), network(8)
    x = torch.randn(N, 10)
    return engine, *engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=BATCH),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=epochs,
        max_grad_norm=1.0,
        poisson_sampling=poisson,
    )


def epoch(model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("poisson", [True, False])
def test_a_run_stops_before_the_step_that_would_pass_the_target(
    accountant: str, poisson: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model, optimizer, loader = with_target(3, accountant=accountant, poisson=poisson)
    asked = []
    monkeypatch.setattr(Target, "_fits", _counting(Target._fits, asked))
    for _ in range(3):
        epoch(model, optimizer, loader)
    assert not asked  # the planned steps are allowed without asking
    with pytest.raises(BudgetExceeded, match="next one would pass target_epsilon=3"):
        for _ in range(10):
            epoch(model, optimizer, loader)
    assert asked
    noise, rate, steps = engine.accountant.history[0]
    spent = engine.get_epsilon(1e-3)
    more = epsilon_of(accountant=accountant, noise_multiplier=noise, sample_rate=rate, steps=steps + 1, delta=1e-3)
    assert spent <= 3.0 < more
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(BudgetExceeded):
        epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-3) == spent
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def _counting(function: Any, calls: list[Any]) -> Any:
    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return counted


def test_other_steps_count_towards_the_target_too() -> None:
    engine, model, optimizer, loader = with_target(3)
    model(torch.randn(4, 10)).sum(1).mean().backward()
    optimizer.noise_multiplier *= 5
    optimizer.step()  # on a batch from elsewhere, at rate 1
    optimizer.noise_multiplier /= 5
    with pytest.raises(BudgetExceeded):
        for _ in range(4):
            epoch(model, optimizer, loader)
    assert engine.get_epsilon(1e-3) <= 3.0
    optimizer.noise_multiplier = 0.0
    with pytest.raises(BudgetExceeded):
        epoch(model, optimizer, loader)


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 64, 65, 1000])
@pytest.mark.parametrize("planned", [1, 5])
def test_all_steps_that_fit_are_taken_and_few_epsilons_computed(
    steps: int, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    epsilon = epsilon_of(accountant="rdp", noise_multiplier=1.0, sample_rate=0.1, steps=steps, delta=1e-3)
    accountant, asked = create_accountant("rdp"), []
    target = Target(accountant, epsilon=epsilon, delta=1e-3, planned=Phase(1.0, 0.1, planned))
    monkeypatch.setattr(Target, "_fits", _counting(Target._fits, asked))
    with pytest.raises(BudgetExceeded):
        for _ in range(2000):
            target.check(1.0, 0.1)
            accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    assert len(accountant) == max(steps, planned)
    assert len(asked) <= 40


@pytest.mark.parametrize("name", ["prv", "rdp"])
def test_a_schedule_of_noises_and_rates_stops_where_its_epsilon_would_pass_the_target(name: str) -> None:
    accountant = create_accountant(name)
    target = Target(accountant, epsilon=1.0, delta=1e-5, planned=Phase(1.0, 0.01, 40))
    following = Phase(0.0, 0.0, 1)
    with pytest.raises(BudgetExceeded):
        for number in range(2000):
            following = Phase(2.0 * 0.99**number, 0.01 + 0.005 * (number % 3), 1)
            target.check(*following[:2])
            accountant.step(noise_multiplier=following.noise_multiplier, sample_rate=following.sample_rate)
    assert 10 < len(accountant) < 200
    assert accountant.get_epsilon(1e-5) <= 1.0 < accountant.epsilon_after(following, 1e-5)


def test_charged_steps_count_towards_the_target(tmp_path: Path) -> None:
    crashed(tmp_path)
    continued = run(tmp_path)
    engine = continued.engine
    epsilon = epsilon_of(accountant="rdp", noise_multiplier=SIGMA, sample_rate=RATE, steps=18, delta=1e-3)
    engine.run.step_accounting.target = Target(
        engine.accountant, epsilon=epsilon, delta=1e-3, planned=Phase(SIGMA, RATE, 18)
    )
    continued.load(tmp_path / "run.ckpt", replay=False)
    with pytest.raises(BudgetExceeded):
        continued.finish()
    assert len(engine.accountant) == len(lines(tmp_path)) == 18
    assert lsg.BudgetExceeded is BudgetExceeded and issubclass(BudgetExceeded, PrivacyError)
