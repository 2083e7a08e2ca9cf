"""A data set on each rank in; an error where ranks have other records, or the same ones in another order.

Each rank computes its share of the record numbers drawn. A record that has another number on another rank could be in
several shares of one step, which its clip does not bound.
"""

import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lsg.distributed.group import Group

_LOOKS, _MORE_LOOKS = 2, 12  # by chance a random flip is the same that often with a probability of 1 / 4096
_DEEPEST = 8  # values inside of values

Fields = dict[str, str | None]  # of a record: a digest of each of its values; None where the value changes by itself


def check_same_records(dataset: Any, group: Group) -> None:
    """Refuse, by name, records that differ between the ranks. A few are looked at. Every rank has to call this."""
    if group.alone:
        return
    everyones = group.everyones(_some_records(dataset, _LOOKS), "a comparison of a few records")
    if not _differs(everyones):
        return
    # A value drawn at random by a generator of the data set's own may have been the same twice: it is looked at again.
    own = _some_records(dataset, _MORE_LOOKS)
    everyones = group.everyones(own, "a second comparison of a few records")
    alike = _in_common(everyones)
    group.check_alike({name: own[name] for name in own if name not in alike}, "Every rank must read the same data")


def _differs(everyones: list[Fields]) -> bool:
    return len(_in_common(everyones)) < len({name for fields in everyones for name in fields})


def _in_common(everyones: list[Fields]) -> set[str]:
    """Names of values that could be the same on all ranks."""
    names = {name for fields in everyones for name in fields}
    known = {name: {fields.get(name, "not there") for fields in everyones} - {None} for name in names}
    return {name for name, digests in known.items() if len(digests) <= 1}


def _some_records(dataset: Any, looks: int) -> Fields:
    """The values of a few records, by what to call them."""
    found: Fields = {}
    several = getattr(dataset, "__getitems__", None)
    if several is None and not hasattr(dataset, "__getitem__"):
        return found  # read in another way, by a sampler's own numbers
    for number in sorted({0, len(dataset) // 3, len(dataset) - 1}):
        seen = []
        for _ in range(looks):
            with _same_random_numbers():
                seen.append(_fields(several([number]) if several else dataset[number]))
        for name in {name: None for fields in seen for name in fields}:
            digests = {fields.get(name) for fields in seen}
            words = f"record {number} of the data set" + (f", its {name!r}," if name else "")
            found[words] = digests.pop() if len(digests) == 1 else None
    return found


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """The generators that augmentations draw from begin alike on all ranks in here, and go on as before after it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _fields(record: Any) -> dict[str, str]:
    """Digests of what a record is made of, by name or place. Of a data set that makes batches: of one in a batch."""
    if isinstance(record, list) and len(record) == 1:
        return _fields(record[0])
    if isinstance(record, Mapping):
        parts = {str(key): value for key, value in record.items()}
    elif isinstance(record, list | tuple):
        parts = {str(place): value for place, value in enumerate(record)}
    else:
        parts = {"": record}
    return {name: _digest(value) for name, value in parts.items()}


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for part in _plain(value, 0):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:12]


def _plain(value: Any, depth: int) -> Iterator[bytes]:
    """All numbers and words in a value of any kind, as bytes; nothing of a kind that has none to see."""
    if isinstance(value, Tensor):
        dense = value.detach().cpu().resolve_conj().resolve_neg()
        dense = (dense if dense.layout is torch.strided else dense.to_dense()).contiguous()
        yield f"{dense.dtype} {tuple(dense.shape)}".encode()
        yield dense.flatten().view(torch.uint8).numpy().tobytes()
    elif value is None or isinstance(value, str | bytes | int | float | complex):
        yield repr(value).encode()
    elif depth < _DEEPEST:
        for part in _inside(value):
            yield from _plain(part, depth + 1)


def _inside(value: Any) -> Iterator[Any]:
    """What a value that is no plain one is made of."""
    yield type(value).__name__
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):  # NumPy, images, pandas
        array = np.asarray(value)
        yield from (str(array.dtype), str(array.shape))
        yield from array.ravel().tolist() if array.dtype.hasobject else (array.tobytes(),)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from (key, part)
    elif isinstance(value, set | frozenset):
        yield from sorted(map(_digest, value))  # their order is another one in each process
    elif isinstance(value, list | tuple):
        yield from value
    elif dataclasses.is_dataclass(value):
        yield from (getattr(value, field.name) for field in dataclasses.fields(value))
    else:
        yield from getattr(value, "__dict__", {}).values()
