"""What helps private training? One change at a time from a common base, for DPSGD, RGP and LSG alike.

    python benchmarks/what_helps.py OUTPUT.jsonl --sst2 GLUE/SST-2 --encoder MINILM_FOLDER --fashion FOLDER

A row of OUTPUT is one tool on one task with one method, with its last weights or with their average over a share of the
steps. Its learning rate is the best of those that `tuned` tries, on records that are neither trained on nor tested on
(`split`); its scores on the test records are those of other seeds. Tools that OUTPUT has already are not run again.
About half an hour of one core.
"""

import argparse
import contextlib
import gzip
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from what_helps_tools import AdaptiveClip, LowPass, NoiseAwareAdam, Shrink, subspaces_from

from lsg import DPSGD, LSG, RGP, PrivacyEngine, WeightAverage
from lsg.accounting.calibration import calibrate_noise
from lsg.methods import Method
from lsg.models import small_cnn
from lsg.sampling.random_sources import fresh_generator
from lsg.step.optimizer import PrivateOptimizer
from lsg.tasks.digits import digits
from lsg.train.lr_schedule import share as scheduled
from lsg.train.provenance import provenance

METHODS: dict[str, type[Method]] = {"dpsgd": DPSGD, "rgp": RGP, "lsg": LSG}
LRS, TUNING_SEEDS, SEEDS = (0.3, 1.0, 3.0), (100, 101), tuple(range(5))
AVERAGING = (0.0, 0.1, 0.3)  # shares of the steps; 0 is the last weights. All from the same runs


# --- what is tried ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The base: SGD with momentum at a constant rate, flat clipping. A tool changes one of them."""

    optimizer: str = "sgd"
    momentum: float = 0.9
    schedule: str = "constant"
    warmup: float = 0.0
    clipping: str = "flat"
    clip: float = 1.0
    batch: float = 1.0  # times the task's
    low_pass: float = 0.0
    shrink: bool = False
    subspaces: str = "weights"
    options: dict[str, Any] = field(default_factory=dict)  # of the method
    lr: float = 1.0  # times the task's: where the grid of rates lies
    adam_lr: float | None = None  # the middle of that grid for Adam, on any task


BASE = Settings()
LOW_RANK = ("rgp", "lsg")
TOOLS: dict[str, tuple[Settings, tuple[str, ...]]] = {
    "base": (BASE, tuple(METHODS)),
    "linear decay": (replace(BASE, schedule="linear"), tuple(METHODS)),
    "automatic clipping": (replace(BASE, clipping="automatic"), tuple(METHODS)),
    "adaptive clipping": (replace(BASE, clipping="adaptive"), tuple(METHODS)),
    "Adam": (replace(BASE, optimizer="adam", adam_lr=0.01), tuple(METHODS)),
    "Adam, noise-aware": (replace(BASE, optimizer="noise-aware", adam_lr=0.01), tuple(METHODS)),
    "low-pass filter, not momentum": (replace(BASE, low_pass=0.9, momentum=0.0, lr=10.0), tuple(METHODS)),
    "shrunk singular values": (replace(BASE, shrink=True), tuple(METHODS)),
    "random subspaces": (replace(BASE, subspaces="random"), LOW_RANK),
    "subspaces of past updates": (replace(BASE, subspaces="updates"), LOW_RANK),
    "clip 0.1": (replace(BASE, clip=0.1, lr=10.0), tuple(METHODS)),
    "warm-up 0.1": (replace(BASE, warmup=0.1), tuple(METHODS)),
    "rank by layer: dense head": (replace(BASE, options={"dense": ("head.*",)}), LOW_RANK),
    "batch x 2": (replace(BASE, batch=2.0), tuple(METHODS)),
    "cosine decay": (replace(BASE, schedule="cosine"), tuple(METHODS)),
}


# --- on what ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Data, a model, and the base's numbers for it. linear: one dense layer, on which all methods are DPSGD."""

    name: str
    data: Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
    model: Callable[[], nn.Module]
    records: int
    batch: int
    epochs: int
    lr: float
    delta: float
    epsilon: float
    linear: bool = False


class HeadOnHidden(nn.Module):
    """Pixels, one hidden layer of tanh, a head."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(inputs, hidden), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def digits_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = digits()
    return data.train_images, data.train_labels, data.test_images, data.test_labels


@lru_cache
def fashion_data(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def read(name: str, header: int) -> Tensor:
        raw = gzip.decompress((folder / name).read_bytes())[header:]
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    def images(name: str) -> Tensor:
        halved = F.avg_pool2d(read(name, 16).view(-1, 1, 28, 28) / 255 - 0.5, 2)
        return halved.flatten(1)

    def labels(name: str) -> Tensor:
        return read(name, 8).long()

    x, y = images("train-images-idx3-ubyte.gz")[:7500], labels("train-labels-idx1-ubyte.gz")[:7500]
    return x, y, images("t10k-images-idx3-ubyte.gz"), labels("t10k-labels-idx1-ubyte.gz")


@lru_cache(maxsize=1)
def sst2_features(folder: Path, encoder: Path, kept: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean-pooled last hidden states of an encoder that is not trained, of 10,000 training records and all of dev.

    kept: a file that they are read from, or written to.
    """
    if kept.exists():
        return torch.load(kept)
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(encoder), AutoModel.from_pretrained(encoder).eval()

    @torch.no_grad()
    def pooled(texts: list[str]) -> Tensor:
        found: list[Tensor] = []
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), 64):
            chosen = [texts[i] for i in order[start : start + 64]]
            inputs = tokenizer(chosen, padding=True, truncation=True, max_length=128, return_tensors="pt")
            mask = inputs["attention_mask"].unsqueeze(2)
            found.append((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.cat(found)[torch.tensor(order).argsort()]

    def part(name: str, limit: int | None) -> tuple[Tensor, Tensor]:
        rows = [line.rstrip("\n").split("\t") for line in (folder / name).open(encoding="utf-8")][1:]
        if limit is not None:
            chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:limit]
            rows = [rows[i] for i in chosen.tolist()]
        return pooled([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])

    found = *part("train.tsv", 10000), *part("dev.tsv", None)
    torch.save(found, kept)
    return found


def tasks(sst2: Path | None, encoder: Path | None, features: Path, fashion: Path | None) -> list[Task]:
    found = []
    if sst2 is not None and encoder is not None:

        def features_of() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return sst2_features(sst2, encoder, features)

        def head() -> nn.Module:
            return nn.Linear(384, 2)

        numbers = {"lr": 0.2, "delta": 1e-5, "epochs": 20, "epsilon": 1.0, "linear": True}
        for records, batch in ((2000, 500), (10000, 1000)):
            name = f"SST-2 features, N = {records:,}"
            found.append(Task(name, features_of, head, records=records, batch=batch, **numbers))
    if fashion is not None:
        found.append(
            Task(
                "Fashion-MNIST, N = 5,000",
                lambda: fashion_data(fashion),
                lambda: HeadOnHidden(196, 32, 10),
                **{"records": 5000, "batch": 500, "epochs": 6, "lr": 1.6, "delta": 1e-5, "epsilon": 3.0},
            )
        )
    found.append(
        Task(
            "digits",
            digits_data,
            lambda: small_cnn(image_size=8, width=16),
            **{"records": 1437, "batch": 512, "epochs": 20, "lr": 0.4, "delta": 1e-4, "epsilon": 3.0},
        )
    )
    return found


class Records:
    """Inputs and labels that are handed out by whole batches: one by one would take longer than to train on them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._y)

    def __getitems__(self, indices: Any) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self._x[chosen], self._y[chosen]


# --- one run ----------------------------------------------------------------------------------------------------------


def split(task: Task, *, validation: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test records. Where rates are tuned other records stand in for the test: those past the task's N,
    or, where there are none, a fifth of the training records."""
    x, y, test_x, test_y = task.data()
    if not validation:
        return x[: task.records], y[: task.records], test_x, test_y
    if len(x) > task.records:
        return x[: task.records], y[: task.records], x[task.records :], y[task.records :]
    held = torch.arange(len(x)) % 5 == 4
    return x[~held], y[~held], x[held], y[held]


@lru_cache
def noise(epsilon: float, delta: float, rate: float, steps: int) -> float:
    return calibrate_noise(accountant="prv", target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps)


def make_optimizer(settings: Settings, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=lr)
    if settings.optimizer == "noise-aware":
        return NoiseAwareAdam(model.parameters(), lr=lr, floor=0.1)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=settings.momentum)


def rate(settings: Settings, step: int, steps: int) -> float:
    if settings.schedule == "cosine":
        return (1 + math.cos(math.pi * step / steps)) / 2
    return scheduled(settings.schedule, step, steps, settings.warmup)


def scores_of(
    task: Task, method: type[Method], settings: Settings, lr: float, seed: int, *, validation: bool
) -> dict[float, float]:
    """Accuracy after one private run, by the share of its steps that weights are averaged over."""
    x, y, test_x, test_y = split(task, validation=validation)
    batch = round(min(task.batch * settings.batch, len(x) / 2))
    steps = round(task.epochs * len(x) / batch)
    sigma = noise(task.epsilon, task.delta, batch / len(x), steps)
    adaptive = AdaptiveClip(sigma, batch) if settings.clipping == "adaptive" else None
    torch.manual_seed(seed)
    model = task.model()
    own = make_optimizer(settings, model, lr)
    with subspaces_from(settings.subspaces) as updates:
        engine = PrivacyEngine(accountant="rdp")
        _, optimizer, loader = engine.make_private(
            module=model,
            optimizer=own,
            data_loader=DataLoader(
                Records(x, y),
                batch_size=batch,
                collate_fn=lambda whole: whole,
                generator=torch.Generator().manual_seed(seed),
            ),
            noise_multiplier=sigma if adaptive is None else adaptive.sigma_gradients,
            max_grad_norm=settings.clip,
            clipping="flat" if adaptive is not None else settings.clipping,
            method=method(**settings.options),
            max_physical_batch_size=512,
            noise_generator=fresh_generator(torch.device("cpu"), f"{seed}".encode()),
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda step: rate(settings, step, steps))
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
        if isinstance(own, NoiseAwareAdam):
            own.private = optimizer
        if settings.low_pass:
            LowPass(optimizer, settings.low_pass)
        if settings.shrink:
            Shrink(optimizer)
        if settings.subspaces == "updates":
            optimizer.register_step_post_hook(lambda *_: remember(updates, model))
        averages = {share: WeightAverage(optimizer, share) for share in AVERAGING if share}
        train(model, optimizer, loader, engine, adaptive, steps)
    found = {}
    for share in AVERAGING:
        with averages[share].applied() if share else contextlib.nullcontext():
            found[share] = accuracy(model, test_x, test_y)
    return found


def remember(updates: dict[nn.Parameter, Tensor], model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        updates[parameter] = 0.9 * updates.get(parameter, torch.zeros_like(parameter)) + parameter.grad


def train(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    loader: Any,
    engine: PrivacyEngine,
    adaptive: AdaptiveClip | None,
    steps: int,
) -> None:
    while len(engine.accountant) < steps:
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            if adaptive is not None:
                adaptive.see(norms(engine), optimizer.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if adaptive is not None and optimizer.stepped:
                adaptive.follow(optimizer)


def norms(engine: PrivacyEngine) -> Tensor:
    parts = [
        part
        for found in engine.per_sample_gradients().values()
        for part in ([found] if isinstance(found, Tensor) else found)
    ]
    return torch.stack([part.flatten(1).norm(dim=1) for part in parts]).norm(dim=0)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model.eval()(x).argmax(1) == y).double().mean())


# --- all of it --------------------------------------------------------------------------------------------------------


def tuned(run: Callable[[float, int], dict[float, float]], middle: float) -> dict[float, list[dict[float, float]]]:
    """Scores by rate, low to high: three around the middle, and up to two more past an end where the best is there."""
    tuning = {middle * factor: [run(middle * factor, seed) for seed in TUNING_SEEDS] for factor in LRS}
    for _ in range(2):
        ends = {min(tuning): min(LRS), max(tuning): max(LRS)}
        for end in {best_rate(tuning, share) for share in AVERAGING} & ends.keys():
            lr = end * ends[end]
            tuning[lr] = [run(lr, seed) for seed in TUNING_SEEDS]
    return dict(sorted(tuning.items()))


def best_rate(tuning: dict[float, list[dict[float, float]]], share: float) -> float:
    return max(tuning, key=lambda lr: sum(found[share] for found in tuning[lr]))


def rows_of(task: Task, method: str, tool: str) -> list[dict[str, Any]]:
    """One for each share that weights are averaged over."""
    started = time.perf_counter()
    settings, kind = TOOLS[tool][0], METHODS[method]
    tuning = tuned(
        lambda lr, seed: scores_of(task, kind, settings, lr, seed, validation=True),
        settings.adam_lr or settings.lr * task.lr,
    )
    best = {share: best_rate(tuning, share) for share in AVERAGING}
    tested = {
        lr: [scores_of(task, kind, settings, lr, seed, validation=False) for seed in SEEDS] for lr in set(best.values())
    }
    common = {"task": task.name, "epsilon": task.epsilon, "delta": task.delta, "tool": tool}
    common |= {"method": "any" if task.linear else method, "seeds": list(SEEDS), "provenance": provenance()}
    common["seconds_of_all_shares"] = round(time.perf_counter() - started, 1)
    return [
        {
            **common,
            "averaging": share,
            "lr": best[share],
            "tuning": {f"{lr:g}": [found[share] for found in tuning[lr]] for lr in tuning},
            "scores": [found[share] for found in tested[best[share]]],
        }
        for share in AVERAGING
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    for name in ("--sst2", "--encoder", "--fashion"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--features", type=Path, default=Path("sst2-features.pt"), help="where features are kept")
    parser.add_argument("--task", default="", help="tasks whose name begins so; without it, all")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in given.output.open()] if given.output.exists() else []
    known = {(row["task"], row["epsilon"], row["method"], row["tool"]) for row in rows}
    given.output.parent.mkdir(parents=True, exist_ok=True)
    found = tasks(given.sst2, given.encoder, given.features, given.fashion)
    for task in (task for task in found if task.name.startswith(given.task)):
        for tool, (_, methods) in TOOLS.items():
            for method in methods if not task.linear else ("dpsgd",) if "dpsgd" in methods else ():
                if (task.name, task.epsilon, "any" if task.linear else method, tool) in known:
                    continue
                measured = rows_of(task, method, tool)
                with given.output.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in measured)
                means = ", ".join(f"{100 * statistics.mean(row['scores']):.2f}" for row in measured)
                print(f"{task.name}, {method}, {tool}: {means} ({measured[0]['seconds_of_all_shares']} s)", flush=True)


if __name__ == "__main__":
    main()
