"""The loader and the optimizer in loops that count batches, leave early, pass closures or step schedulers at will."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lsg import ConfigurationError, PrivacyEngine, PrivacyError
from lsg.sampling.loader import batch_of_a_process, sampling_plan

N, BATCH = 40, 12


def private(**options: Any) -> tuple[nn.Module, Any, Any]:
    """With the same draws each time, but in secure mode."""
    if "engine" not in options:
        options = {"noise_generator": torch.Generator().manual_seed(1)} | options
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(N, 5, generator=generator), torch.randint(0, 2, (N,), generator=generator))
    model, engine = nn.Linear(5, 2), PrivacyEngine(accountant="rdp", **options.pop("engine", {}))
    return engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=BATCH),
        **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "max_physical_batch_size": 4} | options,
    )


def step(model: nn.Module, optimizer: Any, batch: Any) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"engine": {"secure_mode": True}}, {"poisson_sampling": False}, {"unit_of": [n % 13 for n in range(N)]}],
    ids=["poisson", "secure", "shuffled", "units"],
)
def test_the_length_is_what_the_next_loop_yields(options: dict[str, Any]) -> None:
    if "engine" in options:
        pytest.importorskip("cryptography")
    if "unit_of" in options:
        options = options | {"max_physical_batch_size": 6, "max_records_per_unit": 2}
    model, optimizer, loader = private(**options)
    lengths = []
    for _ in range(6):
        before, count = len(loader), 0
        for batch in loader:
            count += 1
            assert len(loader) == before  # within an epoch, too
            step(model, optimizer, batch)
        assert count == before
        lengths.append(before)
    assert len(set(lengths)) > 1 or not options.get("poisson_sampling", True) or "unit_of" in options


def test_asking_for_the_length_moves_nothing() -> None:
    runs = []
    for ask in (False, True):
        model, optimizer, loader = private(noise_generator=torch.Generator().manual_seed(3))
        drawn = []
        for _ in range(3):
            if ask:
                len(loader), len(loader)
            for batch in loader:
                drawn.append(batch[0])
                step(model, optimizer, batch)
        runs.append(torch.cat(drawn))
    assert torch.equal(*runs)


def test_the_length_can_be_logical_steps() -> None:
    _, _, loader = private()
    assert len(loader) > loader.steps(1) == 3
    loader.length = "steps"
    assert len(loader) == 3
    loader.length = "records"
    with pytest.raises(ConfigurationError, match=r"loader\.length='records'"):
        len(loader)


def test_an_epoch_that_is_left_early_is_noticed() -> None:
    model, optimizer, loader = private()
    for batch in itertools.islice(loader, 2):
        step(model, optimizer, batch)
    with pytest.warns(UserWarning, match=r"after 0 of the 3.*what 2 micro-batches.*dropped.*now another epoch begins"):
        for batch in loader:
            step(model, optimizer, batch)
            if optimizer.stepped:  # a good place to leave, for the last time
                break
    with pytest.warns(UserWarning, match=r"left after 1 of the \d logical steps.*now another epoch begins"):
        for batch in loader:
            step(model, optimizer, batch)


def test_a_loop_that_counts_batches_can_finish_the_epoch() -> None:
    """Expected batches of one record: a third of the draws are empty, some of them the last of an epoch."""
    data = TensorDataset(torch.randn(8, 5), torch.randint(0, 2, (8,)))
    model, engine = nn.Linear(5, 2), PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for epoch in range(1, 9):
        batches = iter(loader)
        for _ in range(len(loader)):
            step(model, optimizer, next(batches))
        loader.finish_epoch()
        assert len(engine.accountant) == loader.steps(epoch)


def test_a_scheduler_that_is_stepped_per_micro_batch_is_told() -> None:
    model, optimizer, loader = private()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in loader:
        step(model, optimizer, batch)
        if optimizer.stepped:
            scheduler.step()
    with pytest.warns(UserWarning, match=r"changed between two micro-batches.*optimizer\.stepped") as told:
        for batch in loader:
            step(model, optimizer, batch)
            scheduler.step()
    assert len(told) == 1


def test_a_closure_is_called_once_and_the_step_comes_after_it() -> None:
    found = []
    for closures in (False, True):
        torch.manual_seed(0)
        model, optimizer, loader = private(noise_generator=torch.Generator().manual_seed(3))
        for x, y in loader:

            def closure(x: Any = x, y: Any = y, model: Any = model, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if closures:
                with torch.no_grad():
                    assert optimizer.step(closure).item() > 0
            else:
                closure()
                optimizer.step()
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_loaders_that_accelerate_has_prepared_are_what_they_were() -> None:
    shards = pytest.importorskip("accelerate.data_loader")
    data = TensorDataset(torch.zeros(N, 1))
    prepared = shards.prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    assert sampling_plan(prepared, poisson=True).batch_size == 4
    for split, whole in ((False, 8), (True, 4)):
        loader = shards.prepare_data_loader(
            DataLoader(data, batch_size=4, shuffle=True), num_processes=2, process_index=1, split_batches=split
        )
        assert sampling_plan(loader, poisson=True, ranks=2).batch_size == whole
        assert batch_of_a_process(loader, 2) == whole // 2
        with pytest.raises(ConfigurationError, match="BatchSamplerShard"):
            sampling_plan(loader, poisson=True, ranks=1)
    assert batch_of_a_process(DataLoader(data, batch_size=4), 2) == 4
    assert batch_of_a_process(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, 0)), 2) == 4
    seeded = shards.prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True), use_seedable_sampler=True)
    assert sampling_plan(seeded, poisson=True).batch_size == 4


def test_accelerate_after_make_private_gets_the_advice_of_the_docs() -> None:
    accelerate = pytest.importorskip("accelerate")
    prepared = accelerate.Accelerator(cpu=True).prepare(*private())
    page = (Path(__file__).parents[2] / "docs" / "hugging-face.md").read_text()
    assert "prepare everything first, then call `make_private` with what came out of it" in page
    with pytest.raises(PrivacyError) as told:
        next(iter(prepared[2]))
    assert "prepare everything first, then call make_private with what came out of it" in str(told.value)
    assert "BatchMemoryManager" not in str(told.value)
