"""Private fine-tuning of a pretrained language model on e-mails, on a leased GPU: perplexity and exposure of secrets.

    python benchmarks/gpu_emails.py EMAILS.jsonl SMOLLM2 OUT.jsonl SECONDS [--tune | --seeds 0,1] [--methods M] [--tiny]
    python benchmarks/gpu_emails.py EMAILS.jsonl SMOLLM2 OUT.jsonl SECONDS --untrained

A cell is a unit (message or sender), a method (LSG, RGP, LoRA by DPSGD, non-private) and ε. Each trains on the e-mails
and on 50 planted secrets, and adds a line to OUT: held-out perplexity, exposure, settings. --tune: two learning rates
for each method at ε = 3 first, scored on a tenth that is held out of the training part; the better ones are taken for
the cells. Cells that OUT has are not run again, and none is begun that would not end within SECONDS. --tiny: every cell
on a few e-mails on the CPU, to see that all run. --untrained: the perplexity of the model as it is; it needs no GPU.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lsg.audit.exposure import random_secrets
from lsg.audit.planted_secrets import REFERENCES, exposed_by
from lsg.distributed.group import Group
from lsg.tasks.language_models import load_language_model
from lsg.train.choose import choose_settings
from lsg.train.config import RunConfig
from lsg.train.language import LanguageScorer
from lsg.train.listener import Listener
from lsg.train.precision import choose_device, choose_precision
from lsg.train.prepare_data import prepare_data
from lsg.train.provenance import provenance

SECRETS = 50
CHARACTERS = 600  # of a message, more than its first 64 tokens
EPSILONS = (3.0, 1.0, 8.0)  # most wanted first
# Few are tried, as time is short; adapters, which start at nothing, want higher ones.
RATES = {"lsg": (5e-4, 2e-3), "rgp": (5e-4, 2e-3), "non-private": (5e-4, 2e-3), "lora": (2e-3, 8e-3)}
COMMON = {
    "task": "generate",
    "max_length": 64,
    "cuda_graphs": False,
    "epochs": 3,
    "sample_prompt": "",
    "max_physical_batch_size": 1024,
    "max_physical_tokens": 32_768,
}
METHODS: dict[str, dict[str, Any]] = {
    "lsg": {"method": "lsg", "rank": 8, "sparsity": 0.5},
    "rgp": {"method": "rgp", "rank": 8},
    "lora": {"method": "dpsgd", "lora": 8},
    "non-private": {"method": "non-private"},
}
UNITS = {"message": {}, "sender": {"unit_column": "sender", "max_records_per_unit": 4}}
AS_IT_IS = {"unit": "message", "method": "untrained", "epsilon": None, "seed": 0, "lr": 0.0, "validation": 0.0}
TINY = {"device": "cpu", "max_length": 16, "epochs": 1, "batch_size": 8, "max_physical_tokens": 256}


def write_emails(source: Path, folder: Path, most: int | None) -> None:
    """The beginnings of those with a text, as train.jsonl and dev.jsonl: every tenth sender's are held out."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    rows = [row | {"text": row["text"][:CHARACTERS]} for row in rows if row["text"].strip()][:most]
    senders = sorted({row["sender"] for row in rows})
    held_out = set(senders[::10])
    for name in ("train", "dev"):
        chosen = [row for row in rows if (row["sender"] in held_out) == (name == "dev")]
        lines = [json.dumps({"text": f"{row['subject']}\n{row['text']}", "sender": row["sender"]}) for row in chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def cells(tune: bool, methods: list[str], seeds: list[int], best: dict[str, float]) -> list[dict[str, Any]]:
    """Names and settings of what is run, the most wanted first."""
    if tune:
        return [
            {"unit": "message", "method": method, "epsilon": 3.0, "seed": 0, "lr": lr, "validation": 0.1}
            for method in methods
            for lr in RATES[method]
        ]
    return [
        {"unit": unit, "method": method, "epsilon": epsilon, "seed": seed, "lr": best[method], "validation": 0.0}
        for seed in seeds
        for epsilon in EPSILONS
        for unit in UNITS
        for method in methods
        if method != "non-private" or (epsilon, unit) == (EPSILONS[0], "message")
    ]


def settings_of(cell: dict[str, Any], data: Path, model: str, tiny: bool) -> RunConfig:
    private = {} if cell["method"] == "non-private" else {"epsilon": cell["epsilon"], **UNITS[cell["unit"]]}
    given = {**COMMON, **METHODS[cell["method"]], **private, "data": str(data), "model": model}
    given |= {name: cell[name] for name in ("seed", "lr", "validation")} | (TINY if tiny else {})
    return choose_settings(given, "gpu_emails.py", Listener())


def untrained(config: RunConfig) -> float:
    """The model's perplexity on the held-out e-mails before training."""
    device = choose_device(config.device)
    data = prepare_data(config, device, Listener())
    model = load_language_model(config.model).to(device).eval()
    tokens = config.max_physical_tokens or 8192
    scorer = LanguageScorer(choose_precision(config.precision, device), device, tokens, causal=True, group=Group())
    with torch.no_grad():
        (found,) = scorer.scores(model, data.evaluation).values()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("emails", type=Path)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--untrained", action="store_true")
    given = parser.parse_args()
    methods = given.methods.split(",")
    began, longest = time.perf_counter(), 0.0
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    tuned = [row for row in done if row["cell"]["validation"]]
    best = {
        method: min((row for row in tuned if row["cell"]["method"] == method), key=lambda row: row["perplexity"])[
            "cell"
        ]["lr"]
        for method in {row["cell"]["method"] for row in tuned}
    }
    if not (given.tune or given.untrained) and not best.keys() >= set(methods):
        raise SystemExit(
            f"run it with --tune first: {given.out} has rates for {', '.join(sorted(best)) or 'no method'}"
        )
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_emails(given.emails, folder, 200 if given.tiny else None)
        if given.untrained:
            perplexity = untrained(
                settings_of(AS_IT_IS | {"method": "non-private", "lr": 1e-3}, folder, given.model, given.tiny)
            )
            row = {"cell": AS_IT_IS, "perplexity": perplexity, "provenance": provenance()}
            with given.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            return
        for cell in cells(given.tune, methods, [int(seed) for seed in given.seeds.split(",")], best):
            if cell in [row["cell"] for row in done]:
                continue
            start = time.perf_counter()
            if start - began + 1.2 * longest > given.seconds:
                print(f"no time left for {cell}", flush=True)
                break
            config = settings_of(cell, folder, given.model, given.tiny)
            every = random_secrets(SECRETS + REFERENCES, 0)
            found = exposed_by(cell["method"], config, every[:SECRETS], every[SECRETS:], folder, Listener())
            took = time.perf_counter() - start
            longest = max(longest, took)
            row = {"cell": cell, "perplexity": found.perplexity, **found.as_json(), "seconds": round(took, 1)}
            settings = {key: value for key, value in config.to_dict().items() if key not in ("data", "model")}
            with given.out.open("a") as out:
                out.write(json.dumps({**row, "settings": settings, "provenance": provenance()}) + "\n")
            print(
                f"[{time.perf_counter() - began:.0f} s] {cell}: perplexity {found.perplexity:.3f}, exposure "
                f"{found.mean:.2f} ± {found.error:.2f} bits, {took:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
