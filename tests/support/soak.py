"""Kills a run with SIGKILL at random moments, continues it each time, and compares its end with that of a whole run."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch

from lsg.accounting.ledger import Ledger
from tests.support.processes import PROCESSES
from tests.support.small_run import Training

_MORE = 1.1  # patience after each kill of a run: one that needs long to begin gets on in the end


def train(folder: Path, options: dict[str, Any]) -> None:
    """Train to the end from wherever the folder stands, with checkpoints at random moments; then write the result.

    options: of `Training`."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    training = Training(engine={"ledger": folder / "ledger"}, **options)
    checkpoint = folder / "run.ckpt"
    if checkpoint.exists():
        training.load(checkpoint)
    else:
        training.save(checkpoint)  # before the first step, so that no step is on the ledger without a checkpoint
    for _ in training.loop:
        if random.random() < 0.3:
            training.save(checkpoint)
    weights = {name: value.tolist() for name, value in training.model.state_dict().items()}
    result = {"weights": weights, "trace": training.trace, "epsilon": training.engine.get_epsilon(1e-3)}
    (folder / "result.tmp").write_text(json.dumps(result))
    os.replace(folder / "result.tmp", folder / "result.json")


def finished(folder: Path, options: dict[str, Any], patience: float | None = None) -> bool:
    """Let a process train; kill it when the patience is over. Returns whether it came to its end."""
    process = PROCESSES.Process(target=train, args=(folder, options))
    process.start()
    process.join(patience)
    killed = process.is_alive()
    process.kill()
    process.join()
    if not killed and process.exitcode != 0:
        raise AssertionError(f"a continuation in {folder} failed with exit code {process.exitcode}")
    return not killed


def soak(folder: Path, kills: int, *, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Kill at least so often, over as many runs as it takes; each run must end as the undisturbed one did.

    options: of `Training`, such as UNITS."""
    choose = random.Random(seed)
    for name in ("first", "whole"):  # the first one also waits for the imports
        (folder / name).mkdir()
        start = time.perf_counter()
        assert finished(folder / name, options)
    longest = 0.7 * (time.perf_counter() - start)
    wanted = json.loads((folder / "whole" / "result.json").read_text())
    assert json.loads((folder / "first" / "result.json").read_text()) == wanted
    done = runs = 0
    while done < kills:
        run = folder / f"run-{runs}"
        run.mkdir()
        patience = longest
        while not finished(run, options, choose.uniform(0, patience)):
            done, patience = done + 1, patience * _MORE
        runs += 1
        assert json.loads((run / "result.json").read_text()) == wanted, f"{run} ended otherwise"
        steps = Ledger(run / "ledger").read().steps
        assert steps == Ledger(folder / "whole" / "ledger").read().steps, f"{run}: {steps} steps on the ledger"
    return {"kills": done, "runs": runs, "epsilon": wanted["epsilon"]}
