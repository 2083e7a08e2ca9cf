"""Bags of embeddings: each record's rows of a table, summed, averaged or their largest; per-sample gradients.

The rows are looked up by the embedding's rule, and joined within a record by PyTorch's operations.
"""

from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.layers.embedding import EMBEDDING, embedding
from lsg.layers.patched_module import PatchedModule
from lsg.layers.rule import Rule
from lsg.layers.samples import SamplePlaces


def embedding_bag_forward(
    module: nn.EmbeddingBag,
    patched: PatchedModule,
    places: SamplePlaces,
    input: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    refuse_offsets(patched.name, input, offsets)
    if per_sample_weights is not None and module.mode != "sum":
        raise PrivacyError(f"embedding bag '{patched.name}' got per_sample_weights, which need mode='sum'")
    rows_BLD = embedding(patched, places.input(), input, module.weight, module.padding_idx)
    filler_BL1 = None if module.padding_idx is None else (input == module.padding_idx).unsqueeze(-1)
    if module.mode == "max":
        return _largest(rows_BLD, filler_BL1)
    if per_sample_weights is not None:
        rows_BLD = rows_BLD * per_sample_weights.unsqueeze(-1)
    if filler_BL1 is not None:
        rows_BLD = rows_BLD.masked_fill(filler_BL1, 0.0)
    if module.mode == "sum":
        return rows_BLD.sum(-2)
    if filler_BL1 is None:
        return rows_BLD.mean(-2)
    return rows_BLD.sum(-2) / (~filler_BL1).sum(-2).clamp_min(1)


def _largest(rows_BLD: Tensor, filler_BL1: Tensor | None) -> Tensor:
    """Of each column, among what is no padding; 0 where there is nothing else."""
    if filler_BL1 is None:
        return rows_BLD.max(-2).values
    largest_BD = rows_BLD.masked_fill(filler_BL1, -float("inf")).max(-2).values
    return largest_BD.masked_fill(filler_BL1.all(-2), 0.0)


def refuse_offsets(
    name: str, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
) -> None:
    """A bag's arguments in: raises where records are told apart by offsets.

    The model asks it before the bag runs without its rule, too: what that makes of them looks like mixed records.
    """
    if input.dim() != 2 or offsets is not None:
        raise PrivacyError(
            f"embedding bag '{name}' got indices of shape {tuple(input.shape)}"
            f"{'' if offsets is None else ' with offsets'}, in which records are not rows: give it one row of indices "
            "for each record, filled up with padding_idx"
        )


EMBEDDING_BAG = Rule(embedding_bag_forward, EMBEDDING.layouts)
