"""How a language model is trained and scored: a model and batches of documents in, a loss out, and perplexities."""

from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from lsg.distributed.group import Group
from lsg.losses import IGNORED, per_sequence
from lsg.tasks.encoded import Batch, Encoded, EncodedLanguage, batches_in_order
from lsg.tasks.measures import perplexity
from lsg.train.precision import autocast
from lsg.train.run_warnings import OneAnswer


class LanguageScorer:
    """In the run's precision. tokens: computed at once in scores. causal: a token is told from those before it, and not
    by a decoder. group: the processes that have the same model; each scores a share of the batches."""

    def __init__(self, precision: str, device: torch.device, tokens: int, *, causal: bool, group: Group) -> None:
        self._precision, self._device, self._group = precision, device, group
        self._tokens, self._causal = tokens, causal

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over records of each one's mean over its own tokens."""
        return self._losses(model, batch).mean()

    def log_likelihoods(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(n,) float64 of each record's tokens together, and how many these are."""
        counts = (batch["labels"] != IGNORED)[:, 1 if self._causal else 0 :].sum(1)
        return -self._losses(model, batch).double() * counts, counts

    def scores(self, model: nn.Module, parts: dict[str, Encoded]) -> dict[str, float]:
        """Perplexity on each part, over all of its tokens. Call it in eval mode without gradients."""
        own = [self._likelihood(model, data) for data in parts.values()]
        shares = self._group.everyones(own)
        found = {}
        for name, of_all in zip(parts, zip(*shares, strict=True), strict=True):
            likelihood, tokens = (sum(values) for values in zip(*of_all, strict=True))
            found[name] = perplexity(likelihood, int(tokens))
        return found

    def one_answer(self, parts: dict[str, Encoded]) -> dict[str, OneAnswer]:
        """None: perplexity is no share of right answers."""
        return {}

    def _losses(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs: dict[str, Any] = {key: value for key, value in batch.items() if key != "labels"}
        with autocast(self._precision, self._device):
            logits = model(**inputs, use_cache=False).logits
        return per_sequence(logits, batch["labels"], shift=self._causal, reduction="none")

    def _likelihood(self, model: nn.Module, data: Encoded) -> list[float]:
        """[log-likelihood, tokens] of this process's batches."""
        assert isinstance(data, EncodedLanguage)
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        size = max(1, self._tokens // int(data.lengths.max()))
        for batch in islice(batches_in_order(data, size), self._group.rank, None, self._group.size):
            told, counts = self.log_likelihoods(model, batch)
            total += torch.stack([told.sum(), counts.sum().double()])
        found: list[float] = total.tolist()
        return found
