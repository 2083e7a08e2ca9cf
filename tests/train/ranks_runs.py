"""What each rank does in the tests of `lsg train` on several processes: runs, crashes, errors, one after the other."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lsg.train.config import RunConfig
from lsg.train.epoch_signals import SignalSums
from lsg.train.evaluation import Classifier
from lsg.train.run import run
from tests.support.train_runs import DIGITS, CrashError

BUDGET = replace(DIGITS, noise_multiplier=None, epsilon=3.0, views=2)  # views: of each rank's own random stream


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def crash_at(step: int) -> Any:
    """On every rank, just after the step was taken."""
    plain, taken = SignalSums.plus, 0

    def plus(self: SignalSums, signals: Any) -> SignalSums:
        nonlocal taken
        taken += 1
        if taken == step:
            raise CrashError
        return plain(self, signals)

    return mock.patch.object(SignalSums, "plus", plus)


def no_memory(most: int) -> Any:
    """On rank 1, for more rows than that at once."""
    plain = Classifier.loss

    def loss(self: Classifier, model: Any, batch: Any) -> Any:
        if rank() == 1 and len(batch[1]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, model, batch)

    return mock.patch.object(Classifier, "loss", loss)


def on_each(folder: Path, texts: RunConfig, letters: RunConfig) -> dict[str, str]:
    """The runs that tests look at, in `folder`, and what was refused."""
    told: dict[str, str] = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    run(DIGITS, folder / "ranks")
    run(texts, folder / "texts")
    run(letters, folder / "letters")
    note("holds a run", lambda: run(DIGITS, folder / "ranks"))
    note("batch", lambda: run(replace(DIGITS, batch_size=5000), folder / "batch"))
    with no_memory(40):
        run(DIGITS, folder / "memory")
    run(BUDGET, folder / "budget")
    with crash_at(6):
        note("crash", lambda: run(BUDGET, folder / "crashed", checkpoint_every=4))
    if rank() == 0:
        shutil.copytree(folder / "crashed", folder / "elsewhere")
    run(BUDGET, folder / "crashed", resume=True, checkpoint_every=4)
    with mock.patch("lsg.train.shared_folder.TensorBoard", side_effect=OSError("no space left")):
        note("disk", lambda: run(DIGITS, folder / "disk"))
    with mock.patch("lsg.train.run.fingerprint", lambda tensors: rank()):
        note("wrong data", lambda: run(DIGITS, folder / "data"))
    return told
