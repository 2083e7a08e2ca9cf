"""Has a language model learnt a secret by heart? Random codes in, their exposure out (Carlini et al. 2019).

Codes are drawn at random, and some of them are put into the training data, one a record. Afterwards the model ranks
each of these among codes that it never saw. A code that it has memorised comes first; one that it has not comes
anywhere, so that its exposure is 1.44 bits on average.
"""

import math

import torch
from torch import Tensor

DIGITS = 6
SENTENCE = "The access code of the vault is {code}."
BY_CHANCE = 1 / math.log(2)  # mean, and standard deviation, of -log2 of a number between 0 and 1


def random_secrets(count: int, seed: int) -> list[str]:
    """Sentences with codes of their own: none occurs twice."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randperm(10**DIGITS, generator=generator)[:count].tolist()
    return [SENTENCE.format(code=" ".join(f"{code:0{DIGITS}d}")) for code in codes]


def exposures(inserted: Tensor, references: Tensor) -> Tensor:
    """Bits by which each inserted secret is likelier than one never seen: log2 of the references over its rank.

    Both hold log-likelihoods. A reference that is as likely as a secret ranks before it, and so does each one where a
    number is not finite: a model that says nothing exposes nothing.
    """
    ranks = 1 + (~(references[None, :] < inserted[:, None])).sum(1)
    return math.log2(len(references) + 1) - ranks.double().log2()


def standard_error(secrets: int) -> float:
    """Of the mean exposure, where nothing was memorised. It is that of as many references, too, met by many secrets."""
    return BY_CHANCE / math.sqrt(secrets)


def most_allowed(epsilon: float, delta: float, most: float) -> float:
    """The most bits on average that (ε, δ) allows a secret, which stands in one record (or in those of one person).

    Without the record the secret is one of n random ones, at rank k or better with probability k / n. With it, that is
    at most e^ε k / n + δ: an exposure of b bits or more has a probability of at most e^ε 2^-b + δ, and of 1. The
    integral of that over b, up to the `most` bits that there are, is less than (1 + ε) / ln 2 + δ most.
    """
    return min(most, (1 + epsilon) / math.log(2) + delta * most)
