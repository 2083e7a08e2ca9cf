"""A run's settings and data in, how its model is trained and scored out; and what a language model writes meanwhile."""

import torch

from lsg.distributed.group import Group
from lsg.tasks.encoded import EncodedLanguage
from lsg.tasks.encoded_documents import EncodedDocuments
from lsg.tasks.encoded_tags import EncodedTags
from lsg.train.config import RunConfig
from lsg.train.evaluation import Classifier, Scorer
from lsg.train.language import LanguageScorer
from lsg.train.precision import choose_precision
from lsg.train.prepare_data import PreparedData
from lsg.train.samples import Samples
from lsg.train.tagging import Tagger

_TOKENS = 2048  # scored at once, where --max-physical-tokens is not given


def scorer_of(config: RunConfig, data: PreparedData, device: torch.device, group: Group) -> Scorer:
    precision = choose_precision(config.precision, device)
    if isinstance(data.train, EncodedTags):
        return Tagger(precision, device, group)
    if not isinstance(data.train, EncodedLanguage):
        return Classifier(precision, device, group)
    tokens = config.max_physical_tokens or _TOKENS
    return LanguageScorer(precision, device, tokens, causal=_is_causal(data), group=group)


def samples_of(config: RunConfig, data: PreparedData, device: torch.device) -> Samples | None:
    """None of what writes no texts."""
    if not isinstance(data.train, EncodedLanguage):
        return None
    return Samples(config, data.tokenizer, device, causal=_is_causal(data))


def _is_causal(data: PreparedData) -> bool:
    return isinstance(data.train, EncodedDocuments)
