"""Data sets ready for a device: texts or images in, tensors on the device that answer a list of indices with one batch.

Records are encoded once and stay on the device; a batch is a few indexing kernels, with no Python work for each record
and no copy but that of the indices.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lsg.errors import ConfigurationError
from lsg.tasks.data import Images, Texts
from lsg.tasks.encoded_documents import EncodedDocuments, EncodedPrompted
from lsg.tasks.padded import CHUNK, Indices, PaddedTokens, matrix, on_device, padded

Batch = Any  # what a batch is depends on the model: a dict with "labels", or (images, labels)


@dataclass(frozen=True)
class EncodedTexts:
    """ids, types (n, width) and labels (n,) on the device. lengths (n,) are on the host: loaders sort by them.

    types: token type ids, None where the tokenizer makes none.
    """

    ids: Tensor
    types: Tensor | None
    labels: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Indices) -> dict[str, Tensor]:
        """One batch, as wide as its longest text needs. This is what torch's loaders call."""
        ids, mask = PaddedTokens(self.ids, self.lengths).batch(indices)
        rows = on_device(self.ids.device, torch.as_tensor(indices))
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.types is not None:
            batch["token_type_ids"] = self.types[:, : ids.shape[1]].index_select(0, rows).long()
        return batch | {"labels": self.labels.index_select(0, rows)}


@dataclass(frozen=True)
class EncodedImages:
    """pixels (n, channels, height, width) uint8 and labels (n,) on the device, normalised batch by batch.

    mean, deviation: of each channel, constants that never come from the data that is trained on.
    """

    pixels: Tensor
    labels: Tensor
    mean: Tensor
    deviation: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """One batch."""
        rows = on_device(self.pixels.device, torch.as_tensor(indices))
        return self.normalised(self.pixels.index_select(0, rows)), self.labels.index_select(0, rows)

    def normalised(self, pixels: Tensor) -> Tensor:
        """As a model gets them: in channels-last order on a GPU, where convolutions are faster with it."""
        return _channels_last((pixels.float() / 255 - self.mean) / self.deviation)


@dataclass(frozen=True)
class EncodedFeatures:
    """features (n * views, ...), those of a record adjacent, and labels (n,), on the device: what a fixed part of the
    model made of each record, or of each of its views."""

    features: Tensor
    labels: Tensor
    views: int = 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """One batch of len(indices) * views rows."""
        records = on_device(self.features.device, torch.as_tensor(indices)).repeat_interleave(self.views)
        rows = records * self.views + torch.arange(len(records), device=records.device) % self.views
        return _channels_last(self.features.index_select(0, rows).float()), self.labels.index_select(0, records)


EncodedLanguage = EncodedDocuments | EncodedPrompted
Encoded = EncodedTexts | EncodedLanguage | EncodedImages | EncodedFeatures


def encode_texts(
    texts: Texts,
    tokenizer: Any,
    max_length: int,
    device: torch.device,
    report: Callable[[int], None] = lambda done: None,
) -> EncodedTexts:
    """Tokenize all texts, cut to `max_length` tokens. report: called with the number of texts done."""
    wants_types = "token_type_ids" in tokenizer.model_input_names
    ids: list[list[int]] = []
    types: list[list[int]] = []
    for start in range(0, len(texts), CHUNK):
        chunk = slice(start, start + CHUNK)
        pairs = None if texts.pairs is None else texts.pairs[chunk]
        made = tokenizer(
            texts.texts[chunk],
            pairs,
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=wants_types,
        )
        ids += made["input_ids"]
        types += made["token_type_ids"] if wants_types else []
        report(len(ids))
    tokens = padded(ids, max_length, tokenizer.pad_token_id, device)
    return EncodedTexts(
        tokens.ids,
        matrix(types, tokens.lengths, tokens.ids.shape[1], 0).to(device) if wants_types else None,
        texts.labels.to(device),
        tokens.lengths,
    )


def encode_images(
    images: Images, mean: tuple[float, ...], deviation: tuple[float, ...], device: torch.device
) -> EncodedImages:
    """One mean and deviation a channel, or one for all."""
    channels = images.pixels.shape[1]
    if {len(mean), len(deviation)} - {1, channels}:
        raise ConfigurationError(f"{len(mean)} means and {len(deviation)} deviations for images of {channels} channels")
    constants = (torch.tensor(values, device=device).view(-1, 1, 1) for values in (mean, deviation))
    return EncodedImages(images.pixels.to(device), images.labels.to(device), *constants)


def as_loader(data: Any, batch_size: int) -> DataLoader[Any]:
    """For `PrivacyEngine`. data: encoded, or views of it; it makes whole batches, so there is nothing to collate."""
    return DataLoader(data, batch_size=batch_size, collate_fn=_as_is)


def batches_in_order(data: Encoded, size: int) -> Iterator[Batch]:
    """All records once, texts of like length together: for evaluation, where the order means nothing."""
    if isinstance(data, EncodedTexts | EncodedDocuments | EncodedPrompted):
        order = data.lengths.argsort(stable=True)
    else:
        order = torch.arange(len(data))
    for indices in order.split(size):
        yield data.__getitems__(indices)


def _as_is(batch: Batch) -> Batch:
    return batch


def _channels_last(images: Tensor) -> Tensor:
    """On a GPU, where convolutions are faster with it. What is no image stays as it is."""
    is_image = images.is_cuda and images.ndim == 4
    return images.contiguous(memory_format=torch.channels_last) if is_image else images
