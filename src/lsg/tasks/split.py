"""Parts of a data set by content: records and a share in, the records that belong to that share out.

Whether a record belongs to a part follows from a hash of that record alone: its text, texts or words, or its pixels.
How many other records there are, and in which order, does not matter. So one record more or less moves no other, and
"adding or removing a record" means the same for the user's file as for the part that is trained on. A share of s holds
about s times the records, not an exact number: an exact one would depend on all of them. Equal records stay together.
Labels are not hashed: the number of a class depends on which other classes there are. Where records have persons, the
hash is that of the person's id: all records of a person fall on one side, and one person more or less moves no other.
"""

import hashlib
from collections.abc import Iterator

import numpy as np

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images, Records, Tagged, TaskData, Texts

HELD_OUT, HELD_OUT_PART = 0.1, "held-out"  # share of data that come in one part, and its name
# The key of the hash, for each use of it a version of its own. It is public, and the same for every --seed.
_KEY = b"lsg split 1: "


def divide(records: Records, share: float, use: str) -> tuple[Records, Records]:
    """(the share, the rest), each in the order of the records. use: parts for different uses are independent."""
    chosen = np.fromiter((number / 2**64 < share for number in _hashes(records, use)), dtype=bool, count=len(records))
    return records.take(np.flatnonzero(chosen)), records.take(np.flatnonzero(~chosen))


def how_divided(records: Records) -> str:
    """How `divide` chooses, in words."""
    what = "record's own content" if _persons(records) is None else "person's id"
    return f"chosen by a hash of each {what}"


def hold_out(records: Records, label_names: tuple[str, ...], source: str) -> TaskData:
    """Keeps about a tenth for evaluation: for data that come in one part."""
    evaluation, training = divide(records, HELD_OUT, HELD_OUT_PART)
    if not len(evaluation) or not len(training):
        persons = _persons(records)
        whose = "" if persons is None else f" of {len(set(persons)):,} persons"
        raise ConfigurationError(
            f"{source}: {len(records):,} records{whose}, too few: {len(evaluation):,} of them fall into the tenth that "
            "is held out for evaluation. Give training and evaluation data as two parts"
        )
    used = f"all but about {100 * HELD_OUT:g} % of the data, held out for evaluation, {how_divided(records)}"
    return TaskData(training, {HELD_OUT_PART: evaluation}, label_names, source, used)


def _hashes(records: Records, use: str) -> Iterator[int]:
    """Of each record, a number below 2^64."""
    key = _KEY + use.encode()
    for content in _contents(records):
        yield int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest())


def _persons(records: Records) -> list[str] | None:
    return None if isinstance(records, Images) else records.persons


def _contents(records: Records) -> Iterator[bytes]:
    persons = _persons(records)
    if persons is not None:
        yield from (person.encode() for person in persons)
        return
    if isinstance(records, Images):
        yield from (image.numpy().tobytes() for image in records.pixels)
        return
    if isinstance(records, Tagged):
        for words in records.words:  # lengths tell ["ab"] from ["a", "b"]
            yield b"".join(len(word).to_bytes(8) + word for word in (word.encode() for word in words))
        return
    seconds = records.pairs if isinstance(records, Texts) else records.prompts
    for text, pair in zip(records.texts, seconds or [""] * len(records), strict=True):
        first = text.encode()
        yield len(first).to_bytes(8) + first + pair.encode()  # the length tells "ab", "c" from "a", "bc"
