"""The loss, which lsg cannot see into: where it couples records, lsg must refuse or at least warn."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.adversarial.cases.collection import Two, W, case, sequences, vectors
from tests.adversarial.records import Batch, batch

TOKENS = [batch(b.args[0], targets=torch.arange(b.size * 3).view(b.size, 3) % W) for b in sequences(4, 3)]
LABELS = [batch(b.args[0], targets=torch.arange(b.size) % 3) for b in vectors(4, 5)]


def padded(batches: list[Batch]) -> list[Batch]:
    """Record i has i + 1 tokens (at most three); the rest of its targets is -100."""

    def cut(t: Tensor) -> Tensor:
        places = torch.arange(3).expand_as(t)
        return t.masked_fill(places > torch.arange(len(t)).unsqueeze(1), -100)

    return [batch(*b.args, targets=cut(b.targets)) for b in batches]


def over_all_tokens(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    """PyTorch's own mean: over every token of the batch that counts."""
    return F.cross_entropy(output.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)


def within_records(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    token = F.cross_entropy(output.mT, batch.targets, ignore_index=-100, reduction="none")
    each = token.sum(1) / (batch.targets != -100).sum(1).clamp_min(1)
    return each.mean() if reduction == "mean" else each.sum()


@case("warned", padded(TOKENS), loss=over_all_tokens, reduction="mean")
class MeanOverAllTokens(Two):
    """Records of different lengths: a long record takes weight from the others."""


@case("right", TOKENS, loss=over_all_tokens, reduction="mean")
class MeanOverTokensOfEqualLengths(Two):
    """The same line of code, and each record has as many tokens: a mean of means."""


@case("right", padded(TOKENS), loss=within_records, reduction="mean")
class MeanWithinRecordsFirst(Two):
    pass


def weighted(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    weight = torch.tensor([1.0, 5.0, 0.2, 1.0, 1.0, 1.0], dtype=output.dtype)
    return F.cross_entropy(output, batch.targets, weight=weight)


@case("documented", LABELS, loss=weighted, reduction="mean")
class ClassWeightsUnderAMean(Two):
    """Divides by the batch's sum of weights."""


@case("right", LABELS, loss=lambda y, b, how: F.cross_entropy(y, b.targets), reduction="mean")
class CrossEntropy(Two):
    pass


@case("right", LABELS, loss=lambda y, b, how: F.cross_entropy(y, b.targets, reduction="sum"))
class CrossEntropySummed(Two):
    pass


def contrastive(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    similar = F.normalize(output, dim=1) @ F.normalize(output, dim=1).T
    return F.cross_entropy(similar * 5, torch.arange(len(output)))


@case("documented", vectors(4, 3), loss=contrastive, reduction="mean")
class Contrastive(Two):
    """Each record is pushed away from all others."""


def broadcast(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    """(B, 1) against (B): every output meets every target."""
    return (output[:, :1] - batch.args[0][:, 0]).square().mean()


@case("documented", vectors(4, 3), loss=broadcast, reduction="mean")
class SquaredErrorThatBroadcasts(Two):
    pass


def of_the_mean(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    return output.mean(0).square().sum()


@case("documented", vectors(4, 3), loss=of_the_mean, reduction="mean")
class LossOfTheMean(Two):
    pass


def spread(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    each = output.square().sum(1)
    return each.mean() + (each - each.mean()).square().mean()


@case("documented", vectors(4, 3), loss=spread, reduction="mean")
class VarianceOfTheLosses(Two):
    pass


def hardest(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    """Online mining: only the batch's largest losses count."""
    return output.square().sum(1).topk(max(1, len(output) // 2)).values.mean()


@case("documented", vectors(4, 5), loss=hardest, reduction="mean")
class HardestRecordsOnly(Two):
    pass


def per_record_weights(output: Tensor, batch: Batch, reduction: str) -> Tensor:
    each = output.square().sum(1) * batch.args[0][:, 0].abs()
    return each.mean() if reduction == "mean" else each.sum()


@case("right", vectors(4, 5, 1), loss=per_record_weights, reduction="mean")
class WeightsOfARecordsOwn(Two):
    pass
