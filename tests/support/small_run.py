"""A run that takes moments: dropout, Poisson batches in micro-batches, a scheduler, and a trace of it all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lsg
from lsg import DPSGD, LSG, RGP, NonPrivate, PrivacyEngine, Ramp, SparseDPSGD
from lsg.methods import Method

N, BATCH, PHYSICAL, EPOCHS = 24, 4, 2, 3
# Persons of two or three records, of which at most two enter a step, and two views of each record.
UNITS: dict[str, Any] = {
    "unit_of": [record * record % 17 for record in range(N)],
    "max_records_per_unit": 2,
    "views": 2,
    "max_physical_batch_size": 6,
}

METHODS: dict[str, Method] = {
    "lsg": LSG(rank=2, sparsity=0.5, importance="random", schedule=Ramp(2, 9)),
    "rgp": RGP(rank=2),
    "sparse": SparseDPSGD(sparsity=0.5, importance="random"),
    "dpsgd": DPSGD(),
    "nonprivate": NonPrivate(),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(10, width), nn.Dropout(0.3), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 2))


class Training:
    """One small run: a model with dropout, Poisson batches of micro-batches, a scheduler, and a trace of it all."""

    def __init__(self, method: str = "lsg", optimizer: str = "adam", *, seed: int = 3, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(options.pop("records", N), 10, generator=generator)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model: nn.Module = options.pop("model", None) or network(24)
        self.engine = PrivacyEngine(accountant=options.pop("accountant", "rdp"), **options.pop("engine", {}))
        self.views = options.get("views", 1)
        settings: dict[str, Any] = {
            "noise_multiplier": 0.0 if method == "nonprivate" else 0.8,
            "max_grad_norm": 1.0,
            "max_physical_batch_size": PHYSICAL,
            "noise_generator": torch.Generator().manual_seed(seed),
        }
        source = DataLoader(
            TensorDataset(x, (x[:, 0] > 0).long()),
            batch_size=options.pop("batch_size", BATCH),
            generator=options.pop("sampling_generator", None),
        )
        _, self.optimizer, self.loader = self.engine.make_private(
            module=self.model,
            optimizer=OPTIMIZERS[optimizer](self.model.parameters()),
            data_loader=source,
            method=METHODS[method],
            **settings | options,
        )
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.trace: list[Any] = []
        self.loop = self._batches()  # kept here: an epoch whose loop is dropped is over

    def _batches(self) -> Iterator[None]:
        """Train; stops after each micro-batch, and after each epoch."""
        while self.loader.epoch < EPOCHS:
            for x, y in self.loader:
                if self.views > 1:  # random ones, from the stream of dropout
                    x, y = x.repeat_interleave(self.views, 0), y.repeat_interleave(self.views)
                    x = x + 0.1 * torch.randn_like(x)
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.trace.append((x.tolist(), loss.item(), self.optimizer.stepped))
                yield
            self.scheduler.step()
            self.trace.append(("epoch", self.loader.epoch, self.engine.get_epsilon(1e-3)))
            yield

    def finish(self) -> "Training":
        for _ in self.loop:
            pass
        return self

    def save(self, path: Path) -> None:
        lsg.save_checkpoint(
            path, engine=self.engine, extra={"scheduler": self.scheduler.state_dict(), "trace": self.trace}
        )

    def load(self, path: Path, **options: Any) -> "Training":
        extra = lsg.load_checkpoint(path, engine=self.engine, **options)
        self.scheduler.load_state_dict(extra["scheduler"])
        self.trace = extra["trace"]
        return self

    def result(self) -> tuple[Any, ...]:
        optimizer = self.optimizer.state_dict()
        return (
            [p.tolist() for p in self.model.state_dict().values()],
            [[v.tolist() for v in state.values() if isinstance(v, Tensor)] for state in optimizer["state"].values()],
            optimizer["param_groups"],
            self.engine.accountant.history,
            torch.get_rng_state().tolist(),
        )


def stop_at(training: Training, where: str) -> None:
    """Train up to a place of that kind in the second epoch."""
    for _ in training.loop:
        at_epoch_end = training.trace[-1][0] == "epoch"
        stepped = not at_epoch_end and training.trace[-1][2]
        if training.loader.epoch == 1 and (
            (where == "epochs" and at_epoch_end)
            or (where == "logical steps" and stepped)
            or (where == "micro-batches" and not at_epoch_end and not stepped)
        ):
            return
    raise AssertionError(f"never between {where}")
