"""The products behind every projected layer: a sample's gradients of both factors, on the kept entries only.

With x (B, T, I) coming in and g (B, T, O) coming back, row factor A (O x r) and column factor C (r x I):

    rows:     (x C^T)^T g   restricted to the kept entries of O
    columns:  (g A)^T x     restricted to the kept entries of I

Its reference is four batched products and two selections. On a CUDA device, where those read x and g from memory
several times in thin slices, one Triton kernel does it all (`factor_kernel.py`).
"""

import torch
from torch import Tensor

from lsg.kernels import factor_kernel as kernels
from lsg.kernels.optional_triton import usable

# One program handles one factor of one sample, so a batch has to fill the chip and a sample's tokens a tile.
_FEWEST_SAMPLES, _FEWEST_TOKENS, _LARGEST_RANK = 64, 8, 64


def select(values: Tensor, kept: Tensor | None) -> Tensor:
    """The kept entries along the last dimension."""
    if kept is None:
        return values
    # Selects from one matrix: on a CPU PyTorch takes three to six times as long with more dimensions.
    rows = values.reshape(-1, values.shape[-1]).index_select(1, kept)
    return rows.reshape(*values.shape[:-1], kept.shape[0])


def factor_gradients(
    x_BTI: Tensor,
    g_BTO: Tensor,
    row_factor: Tensor,
    column_factor: Tensor,
    rows: tuple[Tensor | None, Tensor | None],
    columns: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """-> (B, r, kept rows) and (B, r, kept columns).

    rows, columns: the indices of the kept entries, and where each entry goes among them, -1 where masked (None: all).
    """
    if _kernel_pays(x_BTI, row_factor):
        x, g = x_BTI.contiguous(), g_BTO.contiguous()
        sizes = [n if kept is None else kept.shape[0] for n, (kept, _) in ((g.shape[2], rows), (x.shape[2], columns))]
        return kernels.factor_gradients(x, g, row_factor, column_factor, rows[1], columns[1], *sizes)
    return reference_factor_gradients(x_BTI, g_BTO, row_factor, column_factor, rows[0], columns[0])


def reference_factor_gradients(
    x_BTI: Tensor,
    g_BTO: Tensor,
    row_factor: Tensor,
    column_factor: Tensor,
    rows_kept: Tensor | None,
    columns_kept: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The same in PyTorch's operations, in the inputs' precision."""
    rows = select(_thin(column_factor, x_BTI) @ g_BTO, rows_kept)
    return rows, select(_thin(row_factor.mT, g_BTO) @ x_BTI, columns_kept)


def _thin(factor: Tensor, values_BTN: Tensor) -> Tensor:
    """factor (r x N) times each sample's values -> (B, r, T).

    Computes one product for all samples, with the factor on the left: on a CPU a factor of few columns on the right
    takes two to four times as long.
    """
    batch, tokens, width = values_BTN.shape
    products = factor @ values_BTN.reshape(batch * tokens, width).mT
    return torch.unflatten(products, 1, (batch, tokens)).movedim(0, 1)


def _kernel_pays(x_BTI: Tensor, row_factor: Tensor) -> bool:
    return (
        usable(x_BTI)
        and x_BTI.shape[0] >= _FEWEST_SAMPLES
        and x_BTI.shape[1] >= _FEWEST_TOKENS
        and row_factor.shape[1] <= _LARGEST_RANK
    )
