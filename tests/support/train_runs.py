"""Runs of `lsg train` that tests share: a configuration, what a run left, a listener that crashes."""

import json
from pathlib import Path
from typing import Any

import torch

from lsg.train.config import RunConfig
from lsg.train.listener import Listener

CPU = torch.device("cpu")
DIGITS = RunConfig(
    task="digits",
    model="small-cnn",
    noise_multiplier=1.0,
    delta=1e-4,
    accountant="rdp",
    optimizer="sgd",
    lr=0.2,
    batch_size=479,
    epochs=3,
    max_physical_batch_size=128,
    device="cpu",
)


def strict(path: Path) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def rows(folder: Path, *, times: bool = False) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    hidden = () if times else ("seconds", "samples_per_second")
    return [{key: value for key, value in row.items() if key not in hidden} for row in found]


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def same(folder: Path, other: Path) -> None:
    """Everything but times and provenance is equal, to the last bit."""
    assert rows(folder) == rows(other)
    assert weights(folder) == weights(other)
    assert (folder / "privacy.json").read_bytes() == (other / "privacy.json").read_bytes()


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Every scalar of the run's one event file, which must not repeat any."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (folder / "tensorboard").iterdir()
    data, place = path.read_bytes(), 0
    found: dict[tuple[str, int], float] = {}
    while place < len(data):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        length = int.from_bytes(data[place : place + 8], "little")
        event = Event.FromString(data[place + 12 : place + 12 + length])
        for value in event.summary.value:
            assert (value.tag, event.step) not in found
            found[value.tag, event.step] = value.simple_value
        place += 16 + length
    return found


class CrashError(Exception):
    pass


class CrashAt(Listener):
    """Raises at a step, or after an epoch."""

    def __init__(self, *, step: int = 0, epoch: int = 0) -> None:
        self._step, self._epoch = step, epoch

    def step(self, done: int) -> None:
        if done == self._step:
            raise CrashError

    def epoch(self, row: dict[str, Any]) -> None:
        if row["epoch"] == self._epoch:
            raise CrashError
