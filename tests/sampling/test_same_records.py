"""Ranks with other data, or with the same in another order, are refused whatever records are made of."""

import dataclasses
import random
from collections import UserDict
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import Dataset

from lsg.distributed.group import Group
from lsg.errors import ConfigurationError
from lsg.sampling.same_records import _digest, _some_records, check_same_records
from tests.support.ranks import on_ranks

COUNT = 24


@dataclasses.dataclass
class Example:
    pixels: Any
    label: int


class Plain:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


KINDS: dict[str, Any] = {
    "tensors": lambda x, i: (torch.from_numpy(x), i % 2),
    "NumPy": lambda x, i: (x, np.int64(i % 2)),
    "a mapping": lambda x, i: UserDict(pixels=x),
    "inside of lists": lambda x, i: [[{"pixels": x}], i % 2],
    "a dataclass": lambda x, i: Example(x, i % 2),
    "an object": lambda x, i: Plain(pixels=x),
    "an image": lambda x, i: (Image.fromarray((x.reshape(2, 4) * 255).astype(np.uint8)), i % 2),
    "a table's row": lambda x, i: pd.Series([f"text {x[0]:.3f}", 1.0]),
    "bytes": lambda x, i: x.tobytes(),
    "torch's noise": lambda x, i: (torch.from_numpy(x) + torch.randn(8), 0),
    "NumPy's noise": lambda x, i: (x + np.random.randn(8), 0),
    "Python's flips": lambda x, i: (x[::-1].copy() if random.random() < 0.5 else x, 0),
}
FLIPS = random.Random()  # of the data set's own
SEEDLESS = {
    "flips": lambda x, i: (x[::-1].copy() if FLIPS.random() < 0.5 else x, i % 2),
    "noise": lambda x, i: (x + FLIPS.random(), i % 2),
    "a length": lambda x, i: list(x[: FLIPS.randrange(1, 8)]),
}


class Data(Dataset[Any]):
    def __init__(self, kind: Any, order: Any) -> None:
        self._kind, self._x = kind, np.random.RandomState(0).rand(COUNT, 8)[order]

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self._kind(self._x[index], index)


class Batches(Data):
    """Gives several records at once, as a batch."""

    def __getitems__(self, numbers: list[int]) -> Any:
        return {"pixels": self._kind(self._x[numbers], numbers), "number": numbers}


class Lists(Data):
    """Gives several records at once, as a list."""

    def __getitems__(self, numbers: list[int]) -> Any:
        return [self[number] for number in numbers]


def compared(kinds: dict[str, Any], shuffled: bool) -> dict[str, str]:
    """What each kind of record was refused with on this rank."""
    FLIPS.seed(dist.get_rank())
    order = np.random.RandomState(dist.get_rank()).permutation(COUNT) if shuffled else np.arange(COUNT)
    refused = {}
    data = {name: Data(kind, order) for name, kind in kinds.items()}
    data |= {"batches": Batches(lambda x, i: x, order), "lists": Lists(KINDS["a mapping"], order)}
    for name, one in data.items():
        try:
            check_same_records(one, Group.current())
        except ConfigurationError as error:
            refused[name] = str(error)
    return refused


def in_another_order() -> dict[str, str]:
    return compared(KINDS, shuffled=True)


def the_same() -> list[dict[str, str]]:
    return [compared(KINDS, shuffled=False), *(compared(SEEDLESS, shuffled=False) for _ in range(20))]


def test_records_in_another_order_are_refused_on_every_rank_whatever_they_are_made_of() -> None:
    for refused in on_ranks(2, in_another_order):
        assert refused.keys() == {*KINDS, "batches", "lists"}
        assert all("record 0 of the data set" in words and "rank 1" in words for words in refused.values())


def test_the_same_records_pass_also_where_reading_one_changes_it_at_random() -> None:
    """False alarms: three flips that are the same 14 times on both ranks and differ, 60 times: 1e-6."""
    for runs in on_ranks(2, the_same):
        assert not any(runs), runs


def random_states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def test_a_look_at_the_data_moves_no_random_stream() -> None:
    before = random_states()
    for name in ("torch's noise", "NumPy's noise", "Python's flips"):
        assert None not in _some_records(Data(KINDS[name], np.arange(COUNT)), 2).values()
    assert random_states() == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
        ([1, [2]], [[1], 2]),
        ({1, 2}, {1, 3}),
        (torch.ones(2, dtype=torch.bfloat16), -torch.ones(2, dtype=torch.bfloat16)),
    ],
)
def test_digests_tell_values_apart(one: Any, other: Any) -> None:
    assert _digest(one) != _digest(other)
    assert _digest(one) == _digest(one)


def test_a_set_has_one_digest_in_whatever_order_it_is() -> None:
    assert _digest({"a", "b", "c"}) == _digest({"c", "b", "a"})
