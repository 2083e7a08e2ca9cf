"""FSDP2: a run with sharded weights is the run of one process, holds and moves no more than it should, is saved and
loaded at any number of ranks, and refuses on all ranks what it cannot do. Few processes: starting them takes the time.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import lsg
from lsg import DPSGD, LSG, ConfigurationError, PerfConfig, PrivacyEngine, PrivacyError
from lsg.errors import ReplicaError
from tests.distributed import sharded_runs
from tests.distributed.sharded_runs import Case, Ended, begin, counted, distance, ended, train, train_all, train_epoch
from tests.support.ranks import on_ranks

CASES = [
    Case(),
    Case(method="rgp", physical=None, records=20),
    Case(method="dpsgd", clipping="per_layer", records=20),
    Case(method="sparse", records=20, epochs=1),
    Case(clipping="automatic", reshard=True, records=20),
    Case(method="non-private", records=20, momentum=True),
    Case(batch_size=1, epochs=2, records=12),  # empty draws, and ranks without a share
    Case(views=2, physical=4, records=20, epochs=1),
    Case(unit_of=[i // 3 for i in range(30)], records=30, physical=None, batch_size=3),
    Case(model="checkpointed", reshard=False, epochs=2),
    Case(model="wide", offload=True, momentum=True),
    Case(extra={"method": LSG(rank=2, sparsity=0.5, fused_qkv="split")}, model="fused", epochs=1),
    Case(model="llama", records=12, batch_size=4),
    Case(model="wrn", records=12, batch_size=4, momentum=True),
]
CONTINUED = Case(records=24, batch_size=5)


@dataclass(frozen=True)
class Seen:
    """What one of two ranks found."""

    runs: list[Ended]
    moved: dict[str, list[int]]  # by collectives of the last of some logical steps
    held: tuple[int, int, int]  # numbers of weights, gradients and optimizer on this rank
    again: float  # distance of a run that was saved and loaded from one that was not
    words: dict[str, str]  # of refusals, by what was refused
    fillers: int  # in an epoch


def two_ranks(folder: Path) -> Seen:
    runs = train_all(CASES, True)
    moved, held = _count()
    return Seen(runs, moved, held, _save_and_go_on(folder), _refusals(), _fillers())


def _count() -> tuple[dict[str, list[int]], tuple[int, int, int]]:
    run = begin(Case(model="wide", physical=None), sharded=True)
    held = 0, 0, 0
    for inputs, labels in run.loader:
        with counted() as moved:
            sharded_runs.loss(run, inputs, labels).backward()
            run.optimizer.step()
        parameters = [p for p in run.model.parameters() if isinstance(p, DTensor)]
        assert len(parameters) == len(list(run.model.parameters()))
        states = [value for state in run.optimizer.state.values() for value in state.values() if value.dim()]
        held = tuple(sum(t.to_local().numel() for t in ts) for ts in (parameters, [p.grad for p in parameters], states))
        run.optimizer.zero_grad()
    spaces = run.engine.subspaces
    assert spaces["up.weight"].left.shape == (64, 2)
    table = lsg.explain(run.model, LSG(rank=2, sparsity=0.5))
    assert table.dimensions_after == sum(slot.dimensions for slot in run.engine._recorder_in_use().slots.values())
    run.engine.detach()
    assert "forward" not in run.model.__dict__
    return moved, held


def _save_and_go_on(folder: Path) -> float:
    run = begin(CONTINUED, sharded=True, ledger=folder / "ledger")
    train_epoch(run)
    lsg.save_checkpoint(folder / "two", engine=run.engine, extra={"note": 1})
    lsg.save_checkpoint(folder / "two", engine=run.engine, extra={"note": 2})
    assert sorted(path.name for path in folder.iterdir()) == ["ledger", "two"]
    without_ledger = begin(CONTINUED, sharded=True)
    train_epoch(without_ledger)
    lsg.save_checkpoint(folder / "other", engine=without_ledger.engine)
    train_epoch(run)
    undisturbed = ended(run)
    other = begin(CONTINUED, sharded=True, ledger=folder / "ledger")
    assert lsg.load_checkpoint(folder / "two", engine=other.engine) == {"note": 2}
    train_epoch(other)
    return distance(undisturbed, ended(other))


class Mixes(nn.Module):
    """On one rank alone samples see each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y - y.mean(0) if dist.get_rank() == 1 else y


def _private(model: nn.Module, **options: Any) -> Any:
    data = TensorDataset(torch.randn(40, 8), torch.randint(0, 3, (40,)))
    return PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def _refusals() -> dict[str, str]:
    words = {}
    mixing, _, loader = _private(fully_shard(Mixes()), method=DPSGD())
    with pytest.raises(PrivacyError) as refused:
        for x, y in loader:
            F.cross_entropy(mixing(x), y).backward()
    words["mixes on rank 1"] = str(refused.value)
    words["another subspace"] = _other_subspace()
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    for name, model, options in (
        ("replicas of shards", fully_shard(Mixes(), mesh=mesh), {}),
        ("part", _partly(Mixes()), {}),
        ("compiled", fully_shard(Mixes()), {"perf": PerfConfig(compile=True)}),
        ("direct", fully_shard(Mixes()), {"method": LSG(rank=2, importance="direct")}),
    ):
        with pytest.raises(ConfigurationError) as told:
            _private(model, **options)
        words[name] = str(told.value)
    return words


def _other_subspace() -> str:
    """What a rank says, of which one rank's factors are others than those of the rest."""
    run = begin(Case(model="wide", physical=None), sharded=True)
    with pytest.raises(ReplicaError) as told:
        for inputs, labels in run.loader:
            sharded_runs.loss(run, inputs, labels).backward()
            if dist.get_rank() == 1:
                run.engine.subspaces["up.weight"].left.mul_(1.5)
            run.optimizer.step()
    return str(told.value)


def _fillers() -> int:
    """How many fillers came to this rank. Nothing of them is in the sum, also where they are taken in as parts."""
    run = begin(Case(physical=1, records=20), sharded=True)
    recorder, gradients, found = run.engine._recorder_in_use(), run.optimizer.gradients, 0
    for inputs, labels in run.loader:
        sharded_runs.loss(run, inputs, labels).backward()
        if recorder.batch.filler:
            before = gradients.sum
            run.optimizer.accumulate(len(inputs))
            assert gradients.sum is before and recorder.batch.filler and not gradients.pending()
            found += 1
        run.optimizer.step()
    return found


def _partly(model: Mixes) -> nn.Module:
    fully_shard(model.inner)
    return model


def three_ranks(folder: Path) -> tuple[list[Ended], Ended, Ended]:
    uneven = train_all([Case(), Case(model="wide", batch_size=2, records=12)], True)
    from_one = begin(CONTINUED, sharded=True)
    lsg.load_checkpoint(folder / "one", engine=from_one.engine)
    train_epoch(from_one)
    from_two = begin(CONTINUED, sharded=True)
    lsg.load_checkpoint(folder / "other", engine=from_two.engine)
    train_epoch(from_two)
    return uneven, ended(from_one), ended(from_two)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[Seen]:
    return on_ranks(2, two_ranks, folder, seconds=300)


def test_sharded_runs_are_the_runs_of_one_process(seen: list[Seen]) -> None:
    for number, case in enumerate(CASES):
        expected = train(case, False)
        for rank in seen:
            found = rank.runs[number]
            assert distance(found, expected) < 1e-5, case
            assert distance(found, seen[0].runs[number]) == 0, case
            assert found.epsilon == expected.epsilon and found.steps == expected.steps


def test_weights_stay_sharded_and_what_travels_is_thin(seen: list[Seen]) -> None:
    size = sum(p.numel() for p in sharded_runs.Wide().parameters())
    for rank in seen:
        weights, gradients, states = rank.held
        assert weights == gradients and states == 2 * weights and weights <= 0.52 * size
        # Backward, forward: each group of weights is gathered once or twice. No gradient of a weight is reduced.
        gathered = rank.moved.get("all_gather_single", []) + rank.moved.get("all_gather_into_tensor", [])
        assert len(gathered) in (2, 3, 4)
        assert not any(name.startswith("reduce_scatter") for name in rank.moved)
        # One clipped sum, and for each stack of weights two products with its factors and one score of its units.
        factors = 2 * (20 + 64) + 2 * (64 + 256)
        assert sum(rank.moved["all_reduce"]) < 4 * factors + 1500 < size


def test_fillers_enter_no_sum(seen: list[Seen]) -> None:
    assert sum(rank.fillers for rank in seen) > 0


def test_a_saved_run_goes_on_to_the_bit(seen: list[Seen]) -> None:
    assert [rank.again for rank in seen] == [0.0, 0.0]


def test_what_one_rank_refuses_ends_all_and_unknown_sharding_is_named(seen: list[Seen]) -> None:
    for rank in seen:
        assert "samples of a batch influence each other" in rank.words["mixes on rank 1"]
        assert "subspace of 'up.weight'" in rank.words["another subspace"]
        assert "'inner.weight' has placements" in rank.words["replicas of shards"] and "HSDP" in str(rank.words)
        assert "was not given to fully_shard" in rank.words["part"]
        assert "neither recorded nor compiled" in rank.words["compiled"]
        assert "direct" in rank.words["direct"]


def test_a_run_goes_on_at_other_numbers_of_ranks(seen: list[Seen], folder: Path) -> None:
    undisturbed = train(CONTINUED, False)
    two_epochs = train(replace(CONTINUED, epochs=2), False)
    one = begin(CONTINUED, sharded=False)
    assert lsg.load_checkpoint(folder / "other", engine=one.engine) == {}
    train_epoch(one)
    assert distance(ended(one), two_epochs) < 1e-5
    lsg.save_checkpoint(folder / "one", engine=one.engine)
    for uneven, from_one, from_two in on_ranks(3, three_ranks, folder, seconds=200):
        for found, case in zip(uneven, [Case(), Case(model="wide", batch_size=2, records=12)], strict=True):
            assert distance(found, train(case, False)) < 1e-5
        assert distance(from_one, undisturbed) < 1e-5 and from_one.epsilon == undisturbed.epsilon
        assert distance(from_two, two_epochs) < 1e-5 and from_two.epsilon == two_epochs.epsilon


def test_steps_that_cannot_be_repeated_at_another_number_of_ranks_are_charged(seen: list[Seen], folder: Path) -> None:
    run = begin(CONTINUED, sharded=False, ledger=folder / "ledger")
    lsg.load_checkpoint(folder / "two", engine=run.engine)
    assert len(run.engine.accountant) == train(replace(CONTINUED, epochs=2), False).steps


def test_a_damaged_folder_is_refused(seen: list[Seen], folder: Path) -> None:
    file = next((folder / "two" / "tensors").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    run = begin(CONTINUED, sharded=False)
    with pytest.raises(ConfigurationError, match="damaged"):
        lsg.load_checkpoint(folder / "two", engine=run.engine)
