"""Words with tags ready for a model: words and tags in, tensors on a device that answer with batches out.

The first token of a word has the word's tag for its label, and no other token has one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lsg.errors import ConfigurationError
from lsg.losses import IGNORED
from lsg.tasks.data import Tagged
from lsg.tasks.encoded import EncodedTexts
from lsg.tasks.padded import CHUNK, Indices, matrix, padded


@dataclass(frozen=True)
class EncodedTags(EncodedTexts):
    """labels: (n, width). words (n,), on the host: how many each record has, those without a token among them."""

    words: Tensor

    def __getitems__(self, indices: Indices) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        width = batch["input_ids"].shape[1]
        return batch | {"labels": batch["labels"][:, :width].long()}

    @property
    def seen(self) -> int:
        """Words that have a token, in all records."""
        return int((self.labels != IGNORED).sum())

    @property
    def unseen(self) -> int:
        """Words that are cut off, or of which the tokenizer makes no token."""
        return int(self.words.sum()) - self.seen


def encode_tags(
    tagged: Tagged,
    tokenizer: Any,
    max_length: int,
    device: torch.device,
    report: Callable[[int], None] = lambda done: None,
) -> EncodedTags:
    """As `encode_texts`. Words past `max_length` tokens are cut off."""
    if not tokenizer.is_fast:
        raise ConfigurationError(
            f"--model {tokenizer.name_or_path}: its tokenizer does not tell which word a token is of, as one with a "
            "tokenizer.json does"
        )
    wants_types = "token_type_ids" in tokenizer.model_input_names
    ids: list[list[int]] = []
    types: list[list[int]] = []
    labels: list[list[int]] = []
    for start in range(0, len(tagged), CHUNK):
        chunk = slice(start, start + CHUNK)
        made = tokenizer(
            tagged.words[chunk],
            is_split_into_words=True,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=wants_types,
        )
        ids += made["input_ids"]
        types += made["token_type_ids"] if wants_types else []
        labels += [_of_first_tokens(made.word_ids(row), tags) for row, tags in enumerate(tagged.tags[chunk])]
        report(len(ids))
    tokens = padded(ids, max_length, tokenizer.pad_token_id, device)
    width = tokens.ids.shape[1]
    return EncodedTags(
        tokens.ids,
        matrix(types, tokens.lengths, width, 0).to(device) if wants_types else None,
        matrix(labels, tokens.lengths, width, IGNORED).to(device),
        tokens.lengths,
        torch.tensor([len(words) for words in tagged.words]),
    )


def _of_first_tokens(places: list[int | None], tags: list[int]) -> list[int]:
    """places: of each token, which word it is of; None of one that the tokenizer adds."""
    before = [None, *places]
    return [IGNORED if word is None or word == last else tags[word] for word, last in zip(places, before, strict=False)]
