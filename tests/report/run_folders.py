"""Output folders as training runs leave them, with made-up but plausible numbers."""

import json
import math
import random
from pathlib import Path
from typing import Any

from lsg.train.config import RunConfig


def write_run(folder: Path, *, complete: bool = True, score: float = 0.9, **settings: Any) -> Path:
    """A run of `settings` whose accuracy ends near `score`."""
    settings = {"task": "sst2", "model": "models/mpnet-base", "epochs": 6, "epsilon": 3.3} | settings
    config = RunConfig(**settings).to_dict()
    folder.mkdir(parents=True)
    rows = _history(config, score, config["epochs"] if complete else config["epochs"] // 2)
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    (folder / "config.toml").write_text(toml)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "checkpoint").mkdir()
    if complete:
        (folder / "result.json").write_text(json.dumps(_result(config, rows)))
    return folder


def _history(config: dict[str, Any], score: float, epochs: int) -> list[dict[str, Any]]:
    chance = random.Random(f"{config['method']} {config['seed']} {score}")
    end, private = config["epochs"], config["method"] != "non-private"
    rows = []
    for epoch in range(1, epochs + 1):
        accuracy = 0.5 + (score - 0.5) * (1 - math.exp(-3 * epoch / end)) / (1 - math.exp(-3)) + chance.gauss(0, 0.003)
        spent = config["epsilon"] * math.sqrt(epoch / end) if "epsilon" in config else None
        rows.append(
            {
                "epoch": epoch,
                "steps": 34 * epoch,
                "epsilon": spent,
                "loss": 0.7 - 0.4 * accuracy + chance.gauss(0, 0.01),
                "clip_share": 0.9 - 0.1 * epoch / end if private else None,
                "signal_norm": 0.02 / epoch if private else None,
                "noise_norm": 0.3 if private else None,
                "score": accuracy,
                "scores": {"dev": accuracy},
                "lr": 1e-3,
                "seconds": 2.5,
                "samples_per_second": 26000.0,
            }
        )
    return rows


def _result(config: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    private = config["method"] != "non-private"
    privacy = {
        "epsilon": rows[-1]["epsilon"],
        "delta": config["delta"],
        "accountant": "prv",
        "noise_multiplier": 1.25 if private else None,
        "neighbouring_relation": "add or remove one record",
        "statement": "The model is (3.3, 1e-05)-differentially private." if private else "No privacy is claimed.",
        "caveats": ["Loss and accuracy are not private.", "Choosing hyperparameters is not accounted for."],
        "versions": {"lsg": "0.1.0", "torch": "2.13.0"},
    }
    return {
        "config": config,
        "score": rows[-1]["score"],
        "scores": {"dev": rows[-1]["score"]},
        "epsilon": rows[-1]["epsilon"],
        "noise_multiplier": 1.25 if private else None,
        "steps": rows[-1]["steps"],
        "curve": [row["score"] for row in rows],
        "seconds": 2.5 * len(rows),
        "history": rows,
        "privacy": privacy,
        "warnings": ["noise drowns the signal"] if rows[-1]["score"] < 0.75 else [],
        "provenance": {"command": "lsg train", "commit": "0123abc", "hardware": {"gpus": ["H200"], "cores": 16}},
    }


def write_grid(root: Path) -> Path:
    """Ranks x sparsities and budgets on one task, a second task, a run without privacy, one that is not complete."""
    for seed in range(2):
        for rank in (2, 4, 8):
            for sparsity in (0.0, 0.3, 0.5):
                method = {"method": "lsg", "sparsity": sparsity} if sparsity else {"method": "rgp"}
                score = 0.84 + 0.006 * rank + 0.03 * sparsity
                write_run(root / f"r{rank}-p{sparsity}-seed{seed}", score=score, rank=rank, seed=seed, **method)
        for epsilon in (0.8, 1.2, 6.5):
            for method, gain in (("lsg", 0.02), ("rgp", 0.01), ("dpsgd", -0.05)):
                score = 0.8 + gain + 0.04 * math.log(epsilon)
                write_run(
                    root / f"{method}-eps{epsilon}-seed{seed}", score=score, method=method, epsilon=epsilon, seed=seed
                )
    write_run(root / "non-private", method="non-private", epsilon=None, score=0.93)
    write_run(root / "late" / "lsg", complete=False, method="lsg", rank=16, score=0.88)
    write_run(root / "cifar" / "lsg", task="cifar10", model="wrn28-2", method="lsg", rank=16, score=0.58)
    return root
