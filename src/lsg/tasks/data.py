"""What every reader of a data set returns: labelled texts, words or images, or documents, for training
and for evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lsg.tasks.packed import PackedTexts
from lsg.tasks.packed_lists import PackedLists


@dataclass(frozen=True)
class Texts:
    """n texts, or n pairs of them, with labels (n,) int64.

    persons: the id of the person that each of them is of, where the user named a column of ids.
    """

    texts: Sequence[str]
    pairs: Sequence[str] | None
    labels: Tensor
    persons: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: ArrayLike) -> "Texts":
        rows = np.asarray(indices, dtype=np.int64)
        pairs = None if self.pairs is None else _taken(self.pairs, rows)
        persons = None if self.persons is None else [self.persons[i] for i in rows]
        return Texts(_taken(self.texts, rows), pairs, self.labels[rows], persons)


@dataclass(frozen=True)
class Documents:
    """n texts that a language model learns to write, each from its prompt where there are prompts.

    persons: as in `Texts`.
    """

    texts: Sequence[str]
    prompts: Sequence[str] | None
    persons: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: ArrayLike) -> "Documents":
        rows = np.asarray(indices, dtype=np.int64)
        prompts = None if self.prompts is None else _taken(self.prompts, rows)
        persons = None if self.persons is None else [self.persons[i] for i in rows]
        return Documents(_taken(self.texts, rows), prompts, persons)

    def plus(self, texts: Sequence[str]) -> "Documents":
        """With more texts, which have empty prompts, and each a person of its own."""
        prompts = None if self.prompts is None else [*self.prompts, *("" for _ in texts)]
        persons = None if self.persons is None else [*self.persons, *(f"planted: {text}" for text in texts)]
        return Documents([*self.texts, *texts], prompts, persons)


@dataclass(frozen=True)
class Tagged:
    """n lists of words, each word with the number of its tag. persons: as in `Texts`."""

    words: PackedLists[str]
    tags: PackedLists[int]
    persons: list[str] | None = None

    def __len__(self) -> int:
        return len(self.words)

    def take(self, indices: ArrayLike) -> "Tagged":
        rows = np.asarray(indices, dtype=np.int64)
        persons = None if self.persons is None else [self.persons[i] for i in rows]
        return Tagged(self.words.take(rows), self.tags.take(rows), persons)


@dataclass(frozen=True)
class Images:
    """Images (n, channels, height, width) uint8 with labels (n,) int64."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, indices: ArrayLike) -> "Images":
        rows = np.asarray(indices, dtype=np.int64)
        return Images(self.pixels[rows], self.labels[rows])


def _taken(texts: Sequence[str], rows: NDArray[np.int64]) -> Sequence[str]:
    return texts.take(rows) if isinstance(texts, PackedTexts) else [texts[i] for i in rows]


Records = Texts | Documents | Tagged | Images


@dataclass(frozen=True)
class TaskData:
    """evaluation: name of a part ("dev", "test", "dev_matched", ...) -> its records; a score is the mean over parts.
    label_names: of classes; none of documents. source: the path or hub name that it was read from.
    used: which part of the source is trained on, in words; "" for all of its training data.
    columns: of documents and of lists of words, which of them were taken, in words.
    """

    train: Records
    evaluation: dict[str, Records]
    label_names: tuple[str, ...]
    source: str
    used: str = ""
    columns: str = ""
