"""A model and encoded data in, its score on each part of them out; and how a classifier is called."""

from itertools import islice
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.distributed.group import Group
from lsg.files.sign_of_life import doing
from lsg.tasks.encoded import Batch, Encoded, EncodedLanguage, EncodedTexts, batches_in_order
from lsg.train.precision import autocast
from lsg.train.run_warnings import OneAnswer

_BATCH, _IMAGES_ON_GPU = 512, 2048  # a GPU waits for the CPU with fewer


class Scorer(Protocol):
    """What trains and scores models of a kind: a classifier here, of words in `lsg.train.tagging`, a language
    model in `lsg.train.language`."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def scores(self, model: nn.Module, parts: dict[str, Encoded]) -> dict[str, float]: ...

    def one_answer(self, parts: dict[str, Encoded]) -> dict[str, OneAnswer]: ...


class Classifier:
    """How a model is called on a batch, for training (`loss`) and for scores, in the run's precision. group: the
    processes that have the same model; each scores a share of the batches."""

    def __init__(self, precision: str, device: torch.device, group: Group | None = None) -> None:
        self._precision, self._device, self._group = precision, device, group or Group()

    def logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(logits in float32, labels)"""
        with autocast(self._precision, self._device):
            if isinstance(batch, dict):
                inputs = {key: value for key, value in batch.items() if key != "labels"}
                return model(**inputs).logits.float(), batch["labels"]
            images, labels = batch
            return model(images).float(), labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(*self.logits(model, batch))

    def scores(self, model: nn.Module, parts: dict[str, Encoded]) -> dict[str, float]:
        """Accuracy on each part. Call it in eval mode without gradients."""
        own = [self._count_right(model, data) for data in parts.values()]
        shares = self._group.everyones([int(count) for count in own])
        right = [sum(counts) for counts in zip(*shares, strict=True)]
        return {name: count / self.answers(data) for (name, data), count in zip(parts.items(), right, strict=True)}

    def answers(self, data: Encoded) -> int:
        """How many there are in all records together."""
        return len(data)

    def one_answer(self, parts: dict[str, Encoded]) -> dict[str, OneAnswer]:
        """By part: what a model scores that gives everything the label most frequent there."""
        found = {}
        for name, data in parts.items():
            assert not isinstance(data, EncodedLanguage)
            found[name] = OneAnswer(int(data.labels.bincount().max()) / len(data), len(data))
        return found

    def _count_right(self, model: nn.Module, data: Encoded) -> Tensor:
        """How many of the answers to this process's batches are right, still on the device."""
        total = torch.zeros((), dtype=torch.long, device=self._device)
        size = _IMAGES_ON_GPU if total.is_cuda and not isinstance(data, EncodedTexts) else _BATCH
        for batch in islice(batches_in_order(data, size), self._group.rank, None, self._group.size):
            logits, labels = self.logits(model, batch)
            total += (logits.argmax(dim=-1) == labels).sum()
        return total


class Evaluation:
    """The score after an epoch: the mean over parts. `scores` keeps the last one part by part."""

    def __init__(self, scorer: Scorer, parts: dict[str, Encoded]) -> None:
        self._scorer, self._parts = scorer, parts
        self.scores: dict[str, float] = {}

    def one_answer(self) -> dict[str, OneAnswer]:
        """As of the scorer."""
        return self._scorer.one_answer(self._parts)

    def __call__(self, model: nn.Module) -> float:
        with doing("scoring the model"):
            self.scores = self._scorer.scores(model, self._parts)
        return sum(self.scores.values()) / len(self.scores)
