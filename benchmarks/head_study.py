"""A linear head on pooled features: is the recipe's choice near the best of a grid? Several data sets, models, N and ε.

    python benchmarks/head_study.py OUT.jsonl --sst2 SST-2 --emails EMAILS.jsonl --encoders NAME=FOLDER... \
        --cache FOLDER

A row of OUT is one setting in one cell (data, encoder, records, ε), with the scores of three seeds; the row of the
recipe is marked. A seed draws the training records, the head's weights, the batches and the noise. Scores are those of
SST-2's dev sentences, and of every fourth e-mail (is it spam?). Features are those of `lsg train --trainable head`,
computed once, and the head is trained by the engine as there. Rows that OUT has are not run again.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine, WeightAverage
from lsg.recipes.text import head_alone
from lsg.tasks.catalog import load_task
from lsg.tasks.data import Texts
from lsg.tasks.encoded import encode_texts
from lsg.tasks.features import compute_features
from lsg.tasks.models import load_pooled_model, load_tokenizer
from lsg.train.lr_schedule import attach_lr_schedule
from lsg.train.precision import autocast
from lsg.train.provenance import provenance

RECORDS, EPSILONS, SEEDS = (1000, 2000, 4000), (0.5, 1.0, 3.0, 8.0), (0, 1, 2)
POOL = 4500  # texts for training to draw from; features of more would take most of the time
HELD_OUT = 4  # every fourth e-mail
Split = tuple[Tensor, Tensor, Tensor, Tensor]  # features and labels for training, and for the score

# What is tried in place of the recipe's own settings; the first is the recipe.
TRIED: dict[str, dict[str, Any]] = {
    "recipe": {},
    **{
        f"rate {lr:g}, {epochs} epochs": {"lr": lr, "epochs": epochs}
        for lr in (0.01, 0.03, 0.1)
        for epochs in (20, 40, 80)
    },
    "batch / 4": {"batch": 0.25},
    "batch / 4, rate 0.01": {"batch": 0.25, "lr": 0.01},
    "averaging 0.1": {"averaging": 0.1},
    "constant rate": {"schedule": "constant"},
    "flat clipping at 1": {"clipping": "flat"},
}
assert TRIED.pop("rate 0.03, 40 epochs") == {"lr": 0.03, "epochs": 40}  # is the recipe


def sst2(folder: str) -> tuple[Texts, Texts]:
    data = load_task("sst2", folder)
    assert isinstance(data.train, Texts) and isinstance(data.evaluation["dev"], Texts)
    return data.train.take(
        torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))[:POOL]
    ), data.evaluation["dev"]


def emails(file: str) -> tuple[Texts, Texts]:
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    every = Texts(
        [f"{row['subject']}\n{row['text']}" for row in rows],
        None,
        torch.tensor([int(row["group"].startswith("spam")) for row in rows]),
    )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return every.take(order[torch.arange(len(rows)) % HELD_OUT != 0][:POOL]), every.take(order[::HELD_OUT])


def features(encoder: str, parts: tuple[Texts, Texts], cache: Path) -> Split:
    """As `lsg train --trainable head --pooling mean` computes them."""
    if not cache.exists():
        device = torch.device("cpu")
        model, tokenizer = load_pooled_model(encoder, "mean", ("0", "1")), load_tokenizer(encoder)
        found = []
        for part in parts:
            texts = encode_texts(part, tokenizer, 128, device)
            made = compute_features(model, texts, lambda: autocast("fp32", device), lambda done: None)
            found += [made.features, made.labels]
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, cache)
    train, train_labels, test, test_labels = torch.load(cache)
    return train, train_labels, test, test_labels


def score(split: Split, records: int, epsilon: float, seed: int, tried: dict[str, Any]) -> float:
    """One run of the recipe for a head, with what is tried in its place."""
    recipe = head_alone(records)
    settings = {**recipe, "batch": 1.0, "averaging": 0.0, "schedule": "linear", "clipping": "automatic", **tried}
    inputs, labels, test, test_labels = split
    torch.manual_seed(seed)
    kept = torch.randperm(len(inputs))[:records]
    head = nn.Linear(inputs.shape[1], 2)
    nn.init.normal_(head.weight, std=1e-3)
    nn.init.zeros_(head.bias)
    engine = PrivacyEngine()
    batch_size = max(1, round(settings["batch"] * records))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=head,
        optimizer=torch.optim.AdamW(head.parameters(), lr=settings["lr"], weight_decay=0.0),
        data_loader=DataLoader(TensorDataset(inputs[kept], labels[kept]), batch_size=batch_size),
        target_epsilon=epsilon,
        target_delta=1e-5,
        epochs=settings["epochs"],
        max_grad_norm=1.0,
        clipping=settings["clipping"],
        method=DPSGD(),
        noise_generator=torch.Generator().manual_seed(seed),
    )
    attach_lr_schedule(optimizer, settings["schedule"], loader.steps(settings["epochs"]), 0.0)
    average = WeightAverage(optimizer, settings["averaging"]) if settings["averaging"] else None
    for _ in range(settings["epochs"]):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        if average is None:
            return float((model(test).argmax(1) == test_labels).double().mean())
        with average.applied():
            return float((model(test).argmax(1) == test_labels).double().mean())


def cells(splits: dict[tuple[str, str], Split]) -> Iterator[tuple[dict[str, Any], Split, dict[str, Any]]]:
    for epsilon in EPSILONS:
        for records in RECORDS:
            for (data, encoder), split in splits.items():
                for name, tried in TRIED.items():
                    yield (
                        {"data": data, "encoder": encoder, "records": records, "epsilon": epsilon, "tried": name},
                        split,
                        tried,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sst2", required=True)
    parser.add_argument("--emails", required=True)
    parser.add_argument("--encoders", nargs="+", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    given = parser.parse_args()
    sources = {"SST-2": sst2(given.sst2), "e-mails": emails(given.emails)}
    splits = {
        (data, name): features(folder, parts, given.cache / f"{data}-{name}.pt")
        for name, folder in (pair.split("=", 1) for pair in given.encoders)
        for data, parts in sources.items()
    }
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = [{key: row[key] for key in ("data", "encoder", "records", "epsilon", "tried")} for row in done]
    origin = provenance()
    for cell, split, tried in cells(splits):
        if cell in known:
            continue
        began = time.perf_counter()
        scores = [score(split, cell["records"], cell["epsilon"], seed, tried) for seed in SEEDS]
        row = {**cell, "settings": tried, "seeds": SEEDS, "scores": scores, "seconds": time.perf_counter() - began}
        with given.out.open("a") as out:
            out.write(json.dumps({**row, "provenance": origin}) + "\n")
        print(cell, [round(100 * one, 1) for one in scores], f"{row['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
