"""A long run in small that watches its own memory. `benchmarks/soak.py` runs it for 10,000 steps."""

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import LSG, BudgetExceeded, PrivacyEngine, save_checkpoint
from lsg.accounting import create_accountant
from lsg.accounting.ledger import Ledger

RECORDS, BATCH, PHYSICAL = 500, 25, 16
STEPS_AN_EPOCH = RECORDS // BATCH
EPSILON, DELTA = 3.0, 1e-4
SAMPLES = 50  # of memory, evenly over the run
# What the second half of the run may hold more than the first, once the first tenth has warmed caches up.
MOST_GROWTH = {"resident_bytes": 2 << 20, "live_tensors": 0, "live_objects": 20}


def soak(steps: int, folder: Path) -> dict[str, Any]:
    """Train for so many steps, a whole number of epochs; raises AssertionError where the bar is missed."""
    assert steps % STEPS_AN_EPOCH == 0, f"{steps} steps are not whole epochs of {STEPS_AN_EPOCH}"
    torch.manual_seed(0)
    x = torch.randn(RECORDS, 16)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 2))
    engine = PrivacyEngine(ledger=folder / "ledger")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=BATCH),
        target_epsilon=EPSILON,
        target_delta=DELTA,
        epochs=steps // STEPS_AN_EPOCH,
        max_grad_norm=1.0,
        method=LSG(rank=2, sparsity=0.5),
        max_physical_batch_size=PHYSICAL,
    )
    memory: dict[str, list[int]] = {name: [] for name in MOST_GROWTH}
    started = time.perf_counter()
    for epoch in range(steps // STEPS_AN_EPOCH):
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        save_checkpoint(folder / "checkpoint", engine=engine)
        if (epoch + 1) * STEPS_AN_EPOCH * SAMPLES // steps > len(memory["live_objects"]):
            for name, value in measured().items():
                memory[name].append(value)
    seconds = time.perf_counter() - started
    assert all(parameter.isfinite().all() for parameter in model.parameters())

    planned = create_accountant(engine.accountant.name)
    for _ in range(steps):
        planned.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=BATCH / RECORDS)
    recorded = create_accountant(engine.accountant.name)
    recorded.history = Ledger(folder / "ledger").history()
    epsilon = {
        "target": EPSILON,
        "plan": planned.get_epsilon(DELTA),
        "ledger": recorded.get_epsilon(DELTA),
        "engine": engine.get_epsilon(DELTA),
    }
    assert epsilon["plan"] == epsilon["ledger"] == epsilon["engine"] <= EPSILON, epsilon
    assert len(planned) == len(recorded) == len(engine.accountant) == steps
    beyond = _steps_until_it_stops(model, optimizer, loader)
    assert engine.get_epsilon(DELTA) <= EPSILON and len(engine.accountant) == steps + beyond
    growth = {name: _growth(values) for name, values in memory.items()}
    return {
        "steps": steps,
        "seconds": round(seconds, 1),
        "epsilon": epsilon,
        "delta": DELTA,
        "steps_beyond_the_plan_until_the_target": beyond,
        "growth": growth,
        "allowed_growth": MOST_GROWTH,
        "memory": memory,
    }


def _steps_until_it_stops(model: nn.Module, optimizer: Any, loader: Any) -> int:
    """A run that is not told to end does so by itself, within the target."""
    taken = 0
    try:
        while True:
            for inputs, labels in loader:
                F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                taken += optimizer.stepped
    except BudgetExceeded:
        return taken


def measured() -> dict[str, int]:
    gc.collect()
    objects = gc.get_objects()
    return {
        "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "live_tensors": sum(issubclass(type(thing), Tensor) for thing in objects),
        "live_objects": len(objects),
    }


def _growth(values: list[int]) -> float:
    """How much larger the second half is than the first, by their medians, without the first tenth."""
    warm = values[len(values) // 10 :]
    first, second = sorted(warm[: len(warm) // 2]), sorted(warm[len(warm) // 2 :])
    return second[len(second) // 2] - first[len(first) // 2]


def missed(found: dict[str, Any]) -> list[str]:
    """What grew more than allowed."""
    return [name for name, most in MOST_GROWTH.items() if found["growth"][name] > most]
