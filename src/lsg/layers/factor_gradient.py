"""The product behind every projected layer: (p F^T)^T q for each sample, on the kept entries of q only."""

from torch import Tensor


def select(values: Tensor, kept: Tensor | None) -> Tensor:
    """The kept entries along the last dimension."""
    return values if kept is None else values.index_select(-1, kept)


def factor_gradient(p_BTP: Tensor, factor_rP: Tensor, q_BTQ: Tensor, kept: Tensor | None, place: Tensor | None) -> Tensor:
    """p (B, T, P) and q (B, T, Q), projected onto `factor` on p's side -> (B, r, kept).

    `kept` are the indices of the kept entries of Q and `place` is where each entry of Q goes among them, -1 where
    masked (both None: all are kept).
    """
    return select((p_BTP @ factor_rP.mT).mT @ q_BTQ, kept)
