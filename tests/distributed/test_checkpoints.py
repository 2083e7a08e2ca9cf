"""A run on several ranks goes on from its file: to the bit on as many ranks, to rounding on others, ledger included."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lsg import ConfigurationError, load_checkpoint, save_checkpoint
from lsg.accounting.ledger import Ledger
from tests.distributed.runs import Ended, Run, Setting, begin, distance, ended, train, train_epoch
from tests.support.ranks import on_ranks
from tests.support.train_runs import CrashError

SETTING = Setting(records=60, batch_size=15, physical=2)  # four steps an epoch
SPARSE = Setting(records=30, batch_size=1, epochs=2)  # steps that a rank, or all of them, have no record of
SAVED_AT, LOST = 6, 3  # in the second epoch; steps that the ledger has beyond the file


def with_dropout(model: nn.Module) -> nn.Module:
    return nn.Sequential(model, nn.Dropout(0.3))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train_and_save(file: Path, setting: Setting, *, at: int, crash_after: int | None = None, **options: Any) -> Ended:
    """Save once, after step `at`; stop so many steps later."""
    run = begin(setting, **options)
    torch.manual_seed(100 + rank())
    steps = 0

    def stepped() -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            save_checkpoint(file, engine=run.engine, extra={"steps": steps})
        if crash_after is not None and steps == at + crash_after:
            raise CrashError

    unfollow = run.optimizer.on_logical_step(stepped)
    try:
        for _ in range(setting.epochs):
            train_epoch(run)
    except CrashError:
        pass
    unfollow()
    return detached(run)


def go_on(file: Path, setting: Setting, *, replay: bool = True, **options: Any) -> Ended:
    run = begin(setting, **options)
    torch.manual_seed(7)  # replaced by what the file has
    assert load_checkpoint(file, engine=run.engine, replay=replay)["steps"] > 0
    while run.loader.epoch < setting.epochs:
        train_epoch(run)
    return detached(run)


def detached(run: Run) -> Ended:
    result = ended(run, [])
    run.engine.detach()
    return result


def on_three(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["whole"] = train_and_save(folder / "dropout", SETTING, at=SAVED_AT, wrap=with_dropout)
    found["again"] = go_on(folder / "dropout", SETTING, wrap=with_dropout)
    found["plain"] = train_and_save(folder / "plain", SETTING, at=SAVED_AT)
    found["sparse"] = train_and_save(folder / "sparse", SPARSE, at=SAVED_AT)
    found["sparse again"] = go_on(folder / "sparse", SPARSE)
    found["alone"] = go_on(folder / "alone", SETTING)
    for name in ("lost", "elsewhere"):
        ledger = folder / f"{name}.ledger"
        found[name] = train_and_save(folder / name, SETTING, at=SAVED_AT, crash_after=LOST, ledger=ledger)
    found["repeated"] = go_on(folder / "lost", SETTING, ledger=folder / "lost.ledger")
    found["refused"] = refusals(folder)
    return found


def refusals(folder: Path) -> dict[str, str]:
    """What each rank is told; none of them waits for another one afterwards."""
    run, told = begin(SETTING), {}

    def note(name: str, work: Any) -> None:
        try:
            work()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    for tokens, labels in run.loader:
        F.cross_entropy(run.model(tokens), labels).backward()
        run.optimizer.step()
        if not run.optimizer.stepped:
            note("inside", lambda: save_checkpoint(folder / "inside", engine=run.engine))
    note("no folder", lambda: save_checkpoint(folder / "none" / "file", engine=run.engine))
    note("no file", lambda: load_checkpoint(folder / "none", engine=run.engine))
    note("damaged", lambda: load_checkpoint(folder / "damaged", engine=run.engine))
    run.engine.detach()
    other = begin(SETTING)
    note("others", lambda: load_checkpoint(folder / ("plain" if rank() else "dropout"), engine=other.engine))
    other.engine.detach()
    return told


def on_two(folder: Path) -> dict[str, Ended]:
    return {
        "plain": go_on(folder / "plain", SETTING),
        "alone": go_on(folder / "alone", SETTING),
        "dropout": go_on(folder / "dropout", SETTING, wrap=with_dropout),
        "elsewhere": go_on(folder / "elsewhere", SETTING, ledger=folder / "elsewhere.ledger"),
    }


def states_of_one_rank(ledger: Path | None) -> tuple[list[int], float]:
    """Steps after an epoch, a crash after another, and an epoch from each rank's own state, then from rank 0's."""
    steps, noise = [], []
    run = begin(SETTING, wrap=with_dropout, ledger=ledger)
    torch.manual_seed(100 + rank())
    train_epoch(run)
    state = run.engine.state_dict()
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    adam = copy.deepcopy(run.optimizer.state_dict())
    train_epoch(run)
    run.engine.detach()
    sent = [state]
    dist.broadcast_object_list(sent, src=0)
    for given in (state, sent[0]):
        run = begin(SETTING, wrap=with_dropout, ledger=ledger)
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(adam)
        run.engine.load_state_dict(given)
        noise.append(run.optimizer.gradients.noise.state())
        train_epoch(run)
        steps.append(len(run.engine.accountant))
        dropout = torch.rand(()).item()
        run.engine.detach()
    assert torch.equal(noise[0], state["noise"]) and not torch.equal(noise[1], state["noise"])
    return steps, dropout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints")
    train_and_save(made / "alone", SETTING, at=SAVED_AT)
    (made / "damaged").write_bytes((made / "alone").read_bytes()[:-1] + b"!")
    return made


@pytest.fixture(scope="module")
def three(folder: Path) -> list[dict[str, Any]]:
    return on_ranks(3, on_three, folder, seconds=600)


@pytest.fixture(scope="module")
def two(folder: Path, three: Any) -> list[dict[str, Ended]]:
    return on_ranks(2, on_two, folder, seconds=600)


def test_as_many_ranks_go_on_to_the_bit_with_the_dropout_of_each(three: list[dict[str, Any]]) -> None:
    for found in three:
        assert distance(found["again"], found["whole"]) == 0 == distance(found["again"], three[0]["again"])
        assert found["again"].epsilon == found["whole"].epsilon and found["again"].steps == 12


def test_a_file_is_written_after_steps_that_a_rank_had_no_share_of(three: list[dict[str, Any]]) -> None:
    for found in three:
        assert distance(found["sparse again"], found["sparse"]) == 0 == distance(found["sparse"], three[0]["sparse"])
        assert found["sparse again"].steps == found["sparse"].steps == 60


def test_another_number_of_ranks_goes_on_to_rounding(
    folder: Path, three: list[dict[str, Any]], two: list[dict[str, Ended]]
) -> None:
    expected = train(SETTING)
    for found in (
        go_on(folder / "plain", SETTING),
        two[0]["plain"],
        two[1]["plain"],
        two[0]["alone"],
        three[2]["alone"],
    ):
        assert distance(found, expected) < 1e-5
        assert found.epsilon == expected.epsilon and found.steps == expected.steps
    assert distance(two[0]["dropout"], two[1]["dropout"]) == 0 < distance(two[0]["dropout"], three[0]["whole"])


def test_steps_that_were_lost_are_repeated_on_as_many_ranks_and_charged_on_others(
    folder: Path, three: list[dict[str, Any]], two: list[dict[str, Ended]]
) -> None:
    whole, charged = three[0]["plain"], two[0]["elsewhere"]
    assert three[0]["lost"].steps == SAVED_AT + LOST
    assert all(distance(found["repeated"], whole) == 0 and found["repeated"].steps == 12 for found in three)
    assert charged.steps == 12 + LOST and charged.epsilon > whole.epsilon
    assert distance(charged, whole) > 1e-3  # samples and noise are new: the same noise on other sums protects nothing
    for name, steps in (("lost", 12), ("elsewhere", 12 + LOST)):
        assert Ledger(folder / f"{name}.ledger").read().steps == steps


def test_the_state_of_one_rank_loaded_on_all_repeats_no_noise_and_no_dropout(tmp_path: Path) -> None:
    """The dropout of the other ranks is not in it, so that the same noise would meet other sums."""
    # Repeated from an own state, charged from another rank's, if there is a ledger that knows of the lost steps.
    for ledger, expected in ((tmp_path / "ledger", [8, 12]), (None, [8, 8])):
        first, second = on_ranks(2, states_of_one_rank, ledger)
        assert first[0] == second[0] == expected
        assert first[1] != second[1]


def test_what_cannot_be_saved_or_loaded_is_told_on_all_ranks(three: list[dict[str, Any]]) -> None:
    for found in three:
        told = found["refused"]
        assert "ConfigurationError: a logical batch is under way: with several processes save where" in told["inside"]
        assert "FileNotFoundError" in told["no folder"] and "FileNotFoundError" in told["no file"]
        assert "is damaged: its checksum does not fit" in told["damaged"]
        assert "the checksum differs between the processes" in told["others"]


def test_a_process_alone_writes_the_files_that_it_always_wrote(folder: Path) -> None:
    run = begin(SETTING)
    state = run.engine.state_dict()
    assert "ranks" not in state and set(state["random"]) == {"cpu"}
    with pytest.raises(ConfigurationError, match="checksum does not fit"):
        load_checkpoint(folder / "damaged", engine=run.engine)
    run.engine.detach()
