"""Documents ready for a language model: texts and their prompts in, tensors on a device that answer with batches out.

A text ends with the end-of-text token of its tokenizer, so that a model learns where to stop; what is cut off at the
limit of tokens has no end. Only the tokens of the text itself have labels: not those of its prompt, nor padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lsg.errors import ConfigurationError
from lsg.losses import IGNORED
from lsg.tasks.data import Documents
from lsg.tasks.padded import CHUNK, Indices, PaddedTokens, on_device, padded

Report = Callable[[int], None]  # takes the number of texts done


@dataclass(frozen=True)
class EncodedDocuments:
    """For causal models. tokens: of each record its prompt's, then its text's. starts (n,): where the text begins.

    A record whose prompt alone fills the limit of tokens has no label, and a loss and gradient of 0.
    """

    tokens: PaddedTokens
    starts: Tensor

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> Tensor:
        return self.tokens.lengths

    @property
    def parts(self) -> list[Tensor]:
        """All that is told apart of the records."""
        return [self.tokens.ids, self.tokens.lengths, self.starts]

    @property
    def unlearnt(self) -> int:
        """Records without any label: all of their text is cut off."""
        return int((self.starts.cpu() >= self.lengths).sum())

    def __getitems__(self, indices: Indices) -> dict[str, Tensor]:
        """One batch. What a model makes of a token is compared with the next one's label."""
        ids, mask = self.tokens.batch(indices)
        starts = self.starts.index_select(0, on_device(ids.device, torch.as_tensor(indices)))
        counts = mask.bool() & (torch.arange(ids.shape[1], device=ids.device) >= starts[:, None])
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(counts, IGNORED)}


@dataclass(frozen=True)
class EncodedPrompted:
    """For models with an encoder, which reads the prompts, and a decoder. start: what a decoder's input begins with."""

    prompts: PaddedTokens
    texts: PaddedTokens
    start: int

    def __len__(self) -> int:
        return len(self.texts.lengths)

    @property
    def lengths(self) -> Tensor:
        return self.prompts.lengths + self.texts.lengths

    @property
    def parts(self) -> list[Tensor]:
        """As of `EncodedDocuments`."""
        return [self.prompts.ids, self.prompts.lengths, self.texts.ids, self.texts.lengths]

    @property
    def unlearnt(self) -> int:
        return 0

    def __getitems__(self, indices: Indices) -> dict[str, Tensor]:
        """One batch. The decoder sees the tokens before the one that it is to tell."""
        read, mask = self.prompts.batch(indices)
        told, counts = self.texts.batch(indices)
        return {
            "input_ids": read,
            "attention_mask": mask,
            "decoder_input_ids": F.pad(told[:, :-1], (1, 0), value=self.start),
            "labels": told.where(counts.bool(), IGNORED),
        }


def encode_documents(
    documents: Documents, tokenizer: Any, max_length: int, device: torch.device, report: Report = lambda done: None
) -> EncodedDocuments:
    """Prompt and text are tokenized apart and put together as they are, cut to `max_length` tokens."""
    end = end_of_text(tokenizer)
    rows: list[list[int]] = []
    starts: list[int] = []
    for start in range(0, len(documents), CHUNK):
        chunk = slice(start, start + CHUNK)
        texts = documents.texts[chunk]
        if documents.prompts is None:
            before: list[list[int]] = [[] for _ in texts]
            own = _tokens(tokenizer, texts)
        else:
            before = prompt_tokens(tokenizer, documents.prompts[chunk])
            own = _tokens(tokenizer, texts, add_special_tokens=False)
        rows += [(a + _without_end(b, end) + [end])[:max_length] for a, b in zip(before, own, strict=True)]
        starts += [min(len(a), max_length) for a in before]
        report(len(rows))
    return EncodedDocuments(
        padded(rows, max_length, tokenizer.pad_token_id, device), torch.tensor(starts, dtype=torch.long).to(device)
    )


def encode_prompted(
    documents: Documents,
    tokenizer: Any,
    max_length: int,
    start: int,
    device: torch.device,
    report: Report = lambda done: None,
) -> EncodedPrompted:
    """Prompts and texts are each cut to `max_length` tokens."""
    assert documents.prompts is not None
    end = end_of_text(tokenizer)
    prompts: list[list[int]] = []
    texts: list[list[int]] = []
    for first in range(0, len(documents), CHUNK):
        chunk = slice(first, first + CHUNK)
        prompts += [row[:max_length] or [end] for row in _tokens(tokenizer, documents.prompts[chunk])]
        own = tokenizer(text_target=documents.texts[chunk], return_attention_mask=False, verbose=False)["input_ids"]
        texts += [[*_without_end(row, end), end][:max_length] for row in own]
        report(len(texts))
    padding = tokenizer.pad_token_id
    return EncodedPrompted(
        padded(prompts, max_length, padding, device), padded(texts, max_length, padding, device), start
    )


def prompt_tokens(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """As a causal model sees them: with what a text begins with, and without an end."""
    end = end_of_text(tokenizer)
    return [_without_end(row, end) for row in _tokens(tokenizer, list(prompts))]


def end_of_text(tokenizer: Any) -> int:
    """The token that tells where a text ends."""
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise ConfigurationError(
            f"--model {tokenizer.name_or_path}: its tokenizer has no end-of-text token, so that the model could not "
            "learn where to stop"
        )
    return int(end)


def _tokens(tokenizer: Any, texts: Any, **settings: Any) -> list[list[int]]:
    found: list[list[int]] = tokenizer(texts, return_attention_mask=False, verbose=False, **settings)["input_ids"]
    return found


def _without_end(row: list[int], end: int) -> list[int]:
    return row[:-1] if row and row[-1] == end else row
