"""What every reader of a data set returns: labelled texts or images, for training and for evaluation."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Texts:
    """n texts, or n pairs of them, with labels (n,) int64.

    persons: the id of the person that each of them is of, where the user named a column of ids.
    """

    texts: list[str]
    pairs: list[str] | None
    labels: Tensor
    persons: list[str] | None = None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: list[int]) -> "Texts":
        pairs = None if self.pairs is None else [self.pairs[i] for i in indices]
        persons = None if self.persons is None else [self.persons[i] for i in indices]
        return Texts([self.texts[i] for i in indices], pairs, self.labels[indices], persons)


@dataclass(frozen=True)
class Images:
    """Images (n, channels, height, width) uint8 with labels (n,) int64."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def take(self, indices: list[int]) -> "Images":
        return Images(self.pixels[indices], self.labels[indices])


Records = Texts | Images


@dataclass(frozen=True)
class TaskData:
    """evaluation: name of a part ("dev", "test", "dev_matched", ...) -> its records; a score is the mean over parts.
    source: the path or hub name that it was read from.
    used: which part of the source is trained on, in words; "" for all of its training data.
    """

    train: Records
    evaluation: dict[str, Records]
    label_names: tuple[str, ...]
    source: str
    used: str = ""
