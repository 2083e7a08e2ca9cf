"""Continuation: a run that is saved and loaded goes on bit by bit; what does not fit is refused by name."""

import math
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lsg
from lsg import DPSGD, ConfigurationError, PrivacyEngine, PrivacyError
from tests.support.small_run import BATCH, EPOCHS, METHODS, OPTIMIZERS, N, Training, network, stop_at


@pytest.mark.parametrize("where", ["epochs", "logical steps", "micro-batches"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_continues_bit_by_bit(method: str, optimizer: str, where: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    whole = Training(method, optimizer).finish()
    wanted = whole.result()

    torch.manual_seed(1)
    interrupted = Training(method, optimizer)
    stop_at(interrupted, where)
    interrupted.save(tmp_path / "run.ckpt")

    torch.manual_seed(77)  # another process has another random state, and other seeds
    continued = Training(method, optimizer, seed=99).load(tmp_path / "run.ckpt")
    assert continued.loader.epoch == 1
    continued.finish()
    assert continued.trace == whole.trace and continued.result() == wanted


def test_empty_draws_and_every_single_position(tmp_path: Path) -> None:
    """Saved after every batch of a run with many empty draws, and loaded and saved again before it goes on."""
    torch.manual_seed(1)
    whole = Training(batch_size=1).finish()
    wanted = whole.result()
    assert whole.engine.accountant.history[0].steps > sum(1 for t in whole.trace if t[-1] is True)  # some were empty
    torch.manual_seed(1)
    last = Training(batch_size=1)
    while last.loader.epoch < EPOCHS:
        next(last.loop, None)
        last.save(tmp_path / "run.ckpt")
        torch.manual_seed(5)
        last = Training(batch_size=1, seed=4).load(tmp_path / "run.ckpt")
        last.save(tmp_path / "again.ckpt")
        assert (tmp_path / "run.ckpt").read_bytes() == (tmp_path / "again.ckpt").read_bytes()
    assert last.trace == whole.trace and last.result() == wanted


@pytest.mark.parametrize("poisson", [True, False])
def test_sampling_without_poisson_and_workers_continue_too(poisson: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"poisson_sampling": poisson}
    torch.manual_seed(1)
    whole = Training(**options).finish()
    torch.manual_seed(1)
    interrupted = Training(**options)
    stop_at(interrupted, "micro-batches")
    interrupted.save(tmp_path / "run.ckpt")
    continued = Training(**options).load(tmp_path / "run.ckpt").finish()
    assert continued.trace == whole.trace
    assert continued.engine.accountant.history == whole.engine.accountant.history


def test_a_state_taken_after_looking_at_the_subspaces(tmp_path: Path) -> None:
    """`engine.subspaces` makes the next step's subspaces early; the state must lead to the same ones."""
    torch.manual_seed(1)
    first = Training()
    stop_at(first, "logical steps")
    left = first.engine.subspaces["0.weight"].left
    first.save(tmp_path / "run.ckpt")
    first.finish()
    second = Training(seed=8).load(tmp_path / "run.ckpt")
    assert torch.equal(second.engine.subspaces["0.weight"].left, left)
    second.finish()
    assert first.trace == second.trace


def test_states_by_hand_in_any_order() -> None:
    torch.manual_seed(1)
    whole = Training("lsg", "sgd").finish()
    torch.manual_seed(1)
    first, second = Training("lsg", "sgd"), Training("lsg", "sgd", seed=8)
    stop_at(first, "micro-batches")
    state = first.engine.state_dict()
    torch.manual_seed(77)  # of dropout: the state has its own
    second.engine.load_state_dict(state)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.scheduler.load_state_dict(first.scheduler.state_dict())
    second.finish()
    assert first.trace + second.trace == whole.trace


def test_one_generator_for_samples_and_noise_is_two_streams(tmp_path: Path) -> None:
    """Or a continued batch would be completed by another draw, with records that are in its sum already."""

    def training(seed: int) -> Training:
        shared = torch.Generator().manual_seed(seed)
        return Training(noise_generator=shared, sampling_generator=shared)

    torch.manual_seed(1)
    whole = training(3).finish()
    torch.manual_seed(1)
    interrupted = training(3)
    stop_at(interrupted, "micro-batches")
    interrupted.save(tmp_path / "run.ckpt")
    continued = training(5).load(tmp_path / "run.ckpt").finish()
    assert continued.trace == whole.trace and continued.result() == whole.result()


def test_what_was_changed_during_training_is_continued(tmp_path: Path) -> None:
    first = Training()
    stop_at(first, "epochs")
    first.optimizer.noise_multiplier, first.optimizer.max_grad_norm = 1.7, 0.3
    first.save(tmp_path / "run.ckpt")
    second = Training().load(tmp_path / "run.ckpt")
    assert (second.optimizer.noise_multiplier, second.optimizer.max_grad_norm) == (1.7, 0.3)


class Tied(nn.Module):
    """Tied weights, low precision, integer buffers, channels last, a view and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.table.weight
        self.low = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("short", torch.tensor([1.0, math.inf, -0.0, math.nan], dtype=torch.float16))
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("part", self.counts[1:3])
        self.register_buffer("turned", self.short.view(2, 2))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens)).mean(1)


@pytest.mark.filterwarnings("ignore:parameter 'low.weight'.*is not in the optimizer")
def test_every_kind_of_tensor_is_kept_exactly(tmp_path: Path) -> None:
    def attached() -> tuple[Tied, PrivacyEngine]:
        model, engine = Tied(), PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.Adam([model.table.weight, model.conv.weight]),
            data_loader=DataLoader(TensorDataset(torch.zeros(8, 2, dtype=torch.long)), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=DPSGD(),
        )
        return model, engine

    def bits(tensor: Tensor) -> list[int]:
        return tensor.contiguous().flatten().view(torch.uint8).tolist()

    model, engine = attached()
    state = {
        p: {"step": torch.tensor(2.0), "exp_avg": torch.randn_like(p)} for p in (model.table.weight, model.conv.weight)
    }
    engine.run.optimizer.state.update(state)
    extra = {"a": 1, "b": [1.5, None, "ü", (True, math.inf)], 3: {"t": torch.tensor(7, dtype=torch.uint8)}}
    lsg.save_checkpoint(tmp_path / "run.ckpt", engine=engine, extra=extra)
    twin, other = attached()
    with torch.no_grad():
        twin.part.zero_(), twin.short.zero_()
    got = lsg.load_checkpoint(tmp_path / "run.ckpt", engine=other)
    assert repr(got) == repr(extra)
    for (name, value), loaded in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert value.dtype == loaded.dtype and bits(value) == bits(loaded), name
    assert twin.head.weight is twin.table.weight
    moments = other.run.optimizer.state[twin.conv.weight]["exp_avg"]
    assert moments.stride() == model.conv.weight.stride() and torch.equal(moments, state[model.conv.weight]["exp_avg"])
    with safe_open(tmp_path / "run.ckpt", framework="pt") as file:  # any safetensors tool reads it, tied weights once
        assert "model/table.weight" in file.keys() and "model/head.weight" not in file.keys()  # noqa: SIM118


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "records": ({"records": N + 1}, "records=24.*records=25"),
    "batch": ({"batch_size": BATCH + 1}, "batch_size=4.*batch_size=5"),
    "micro-batch": ({"max_physical_batch_size": 3}, "max_physical_batch_size=2.*=3"),
    "sigma": ({"noise_multiplier": 0.9}, "noise_multiplier=0.8.*=0.9"),
    "clip": ({"max_grad_norm": 2.0}, "max_grad_norm=1.0.*=2.0"),
    "clipping": ({"clipping": "automatic"}, "clipping='flat'.*'automatic'"),
    "reduction": ({"loss_reduction": "sum"}, "loss_reduction='mean'.*'sum'"),
    "sampling": ({"poisson_sampling": False}, "poisson_sampling=True.*False"),
    "method": ({"method": "rgp"}, "method=.LSG.*method=.RGP"),
    "accountant": ({"accountant": "prv"}, "accountant='rdp'.*'prv'"),
    "optimizer": ({"optimizer": "sgd"}, "Adam in the file, but SGD"),
    "shape": ({"model": network(23)}, r"'0.weight'.*\[24, 10\] in the file.*\[23, 10\]"),
    "names": ({"model": nn.Sequential(nn.Linear(10, 2))}, "'2.bias' is in the file only"),
    "dtype": ({"model": network(24).double()}, "'0.weight' is torch.float32.*but torch.float64"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_another_run_is_refused_by_name_and_nothing_is_changed(case: str, tmp_path: Path) -> None:
    options, message = REFUSALS[case]
    first = Training()
    stop_at(first, "micro-batches")
    first.save(tmp_path / "run.ckpt")
    other = Training(**options)
    before = other.result()
    with pytest.raises(ConfigurationError, match=f"(?s)run.ckpt.*{message}"):
        lsg.load_checkpoint(tmp_path / "run.ckpt", engine=other.engine)
    assert other.result() == before and other.loader.epoch == 0


def test_a_state_that_has_spent_less_is_refused(tmp_path: Path) -> None:
    training = Training()
    training.save(tmp_path / "run.ckpt")
    training.finish()
    with pytest.raises(PrivacyError, match="spent 0 steps, but this engine has spent 18"):
        lsg.load_checkpoint(tmp_path / "run.ckpt", engine=training.engine)
    assert len(training.engine.accountant) == 18


def test_steps_of_another_run_are_not_forgotten() -> None:
    longer, training = Training(seed=8).finish(), Training()
    stop_at(training, "epochs")
    spent = len(training.engine.accountant)
    training.loop.close()  # type: ignore[attr-defined]
    with pytest.raises(PrivacyError, match=f"has spent {spent} steps of a run that the saved one does not continue"):
        training.engine.load_state_dict(longer.engine.state_dict())
    assert len(training.engine.accountant) == spent
    training.engine.load_state_dict(training.engine.state_dict())  # its own


def test_states_are_taken_and_loaded_between_batches() -> None:
    training = Training()
    state = training.engine.state_dict()
    batches = iter(training.loader)
    x, y = next(batches)
    with pytest.raises(PrivacyError, match="after its optimizer"):
        training.engine.state_dict()
    F.cross_entropy(training.model(x), y).backward()
    with pytest.raises(PrivacyError, match="after its optimizer"):
        training.engine.state_dict()
    training.optimizer.step()
    training.engine.state_dict()
    with pytest.raises(PrivacyError, match="under way"):
        training.engine.load_state_dict(state)
    training.engine.detach()
    with pytest.raises(PrivacyError, match="not attached"):
        training.engine.state_dict()


def test_no_other_step_before_the_epoch_is_finished(tmp_path: Path) -> None:
    first = Training()
    stop_at(first, "micro-batches")
    second = Training()
    second.engine.load_state_dict(first.engine.state_dict())
    second.model(torch.randn(3, 10)).sum(1).mean().backward()
    with pytest.raises(PrivacyError, match="middle of an epoch"):
        second.optimizer.step()


@pytest.mark.parametrize("state", [None, {}, {"version": 1}, []])
def test_what_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"engine\.state_dict"):
        Training().engine.load_state_dict(state)


def test_the_state_is_made_of_plain_values() -> None:
    training = Training()
    stop_at(training, "micro-batches")

    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            value = list(value.values())
        if isinstance(value, list):
            return [check(item) for item in value] and None
        assert value is None or type(value) in (int, float, str, bool, Tensor)

    check(training.engine.state_dict())


# --- the file ---------------------------------------------------------------------------------------------------------


def test_flipped_bits_and_missing_ends_are_detected(tmp_path: Path) -> None:
    training = Training()
    stop_at(training, "micro-batches")
    training.save(tmp_path / "run.ckpt")
    content, path = (tmp_path / "run.ckpt").read_bytes(), tmp_path / "broken.ckpt"
    other = Training()
    before = other.result()
    choose = random.Random(0)
    # Spread over the file, and more of them over its header, which is what gets parsed.
    places = [choose.randrange(len(content)) for _ in range(400)] + [choose.randrange(200) for _ in range(100)]
    for number, place in enumerate(places):
        broken = bytearray(content)
        broken[place] ^= 1 << choose.randrange(8)
        path.write_bytes(content[:place] if number % 4 == 0 else broken)
        with pytest.raises(ConfigurationError, match=r"broken\.ckpt"):
            lsg.load_checkpoint(path, engine=other.engine)
    for longer in (content + b"\0", b""):
        path.write_bytes(longer)
        with pytest.raises(ConfigurationError, match=r"broken\.ckpt"):
            lsg.load_checkpoint(path, engine=other.engine)
    assert other.result() == before


class Bomb:
    def __reduce__(self) -> Any:
        return (os._exit, (3,))


def test_other_files_are_refused_and_never_executed(tmp_path: Path) -> None:
    engine = Training().engine
    torch.save({"x": Bomb()}, tmp_path / "torch.ckpt")
    (tmp_path / "pickle.ckpt").write_bytes(pickle.dumps(Bomb()))
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "other.ckpt", {"format": "pt"})
    (tmp_path / "long.ckpt").write_bytes(b"\xff" * 100)
    for name in ("torch", "pickle", "other", "long"):
        with pytest.raises(ConfigurationError, match=f"{name}.ckpt' is not a checkpoint of lsg"):
            lsg.load_checkpoint(tmp_path / f"{name}.ckpt", engine=engine)
    with pytest.raises(FileNotFoundError, match="gone"):
        lsg.load_checkpoint(tmp_path / "gone.ckpt", engine=engine)


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    monkeypatch.setattr("lsg.checkpoint.VERSION", 2)
    training.save(tmp_path / "run.ckpt")
    monkeypatch.setattr("lsg.checkpoint.VERSION", 1)
    with pytest.raises(ConfigurationError, match=r"run\.ckpt' has version 2, but this lsg reads version 1"):
        lsg.load_checkpoint(tmp_path / "run.ckpt", engine=training.engine)


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, path = Training(), tmp_path / "run.ckpt"
    training.save(path)
    content = path.read_bytes()
    with pytest.raises(ConfigurationError, match="extra/x, a Bomb"):
        lsg.save_checkpoint(path, engine=training.engine, extra={"x": Bomb()})

    def no_room(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_room)
    with pytest.raises(OSError, match="No space"):
        training.save(path)
    assert path.read_bytes() == content and list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="nowhere"):
        training.save(tmp_path / "nowhere" / "run.ckpt")
