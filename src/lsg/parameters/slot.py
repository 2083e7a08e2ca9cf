"""Slots: a trained parameter's place in the private step, with its subspace and its carriers.

A carrier is a zero-valued, zero-memory leaf of shape (batch, ...) that belongs to a *parameter*. Layers return the
carriers' gradients instead of the weight's; autograd sums repeated uses of a parameter (tied weights, modules called
several times), so that after a backward pass a carrier's `.grad` is the per-sample gradient of everything the
parameter did. Only kept entries have room in it.

A layer may leave the two factors of a dense matrix's gradient instead (`factored_calls.py`); both count.

What is made and dropped, and by which word, here and wherever slots are used:

- prepare: carriers for the next micro-batch, without gradients.
- clear: drop the gradients in carriers and calls. The carriers stay, and the next micro-batch may use them again.
- renew: let go of the carriers themselves. A backward that comes late cannot reach the next micro-batch.
- refresh: compute anew from the weights, without data: subspaces and masks, once a logical step; casts.
- release: a logical step's noisy gradient goes into the parameter's `.grad`. `end_logical_step` follows.

Legend: B = samples of the micro-batch, r = rank.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from lsg.distributed.sharding import compute_device, is_sharded, own, own_rows
from lsg.errors import PrivacyError
from lsg.kernels.optional_triton import untransformed
from lsg.parameters import outer
from lsg.parameters.factored_calls import Call, Calls, zeros
from lsg.parameters.outer import OuterProducts
from lsg.subspace import Subspace


@dataclass(frozen=True)
class Layout:
    """How a layer reads a weight as a matrix M = weight.flatten(1).

    transposed: the paper's W (inputs first) is M's transpose. taps: neighbouring columns that form one input unit.
    """

    transposed: bool
    taps: int = 1


def narrowed(shape: torch.Size, narrow: tuple[int, int, int] | None) -> torch.Size:
    """The shape of a part of a tensor, along one dimension."""
    if narrow is None:
        return torch.Size(shape)
    dimension, _, length = narrow
    return torch.Size([length if i == dimension else size for i, size in enumerate(shape)])


class Slot:
    """One trained parameter (or one third of a fused one): projected where `layout` is set, dense where it is None."""

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        layout: Layout | None,
        *,
        narrow: tuple[int, int, int] | None = None,
        maskable: bool = False,
        scale: float = 1.0,
        in_use: Callable[[], nn.Parameter] | None = None,
    ) -> None:
        """in_use: of a parameter that is sharded over ranks, how to read what the module holds of it now."""
        self.name, self.parameter, self.layout = name, parameter, layout
        self.sharded, self._in_use = is_sharded(parameter), in_use
        self.device = compute_device(parameter)  # where carriers, factors and sums are
        self.shape = narrowed(parameter.shape, narrow)  # of the whole weight, or its part, on all ranks together
        self.narrow, self.maskable, self.scale = narrow, maskable, scale
        self.subspace: Subspace | None = None  # set at each logical step when projected
        self.elements_kept: Tensor | None = None  # of a dense slot: indices into the flat weight (Sparse DPSGD)
        self.carriers: tuple[Tensor, ...] = ()
        # Carriers and calls of other sizes that this micro-batch had before, as long as a backward may reach them.
        self._replaced: list[weakref.ref[Tensor] | weakref.ref[Calls]] = []
        self.calls = Calls()  # of the carriers' generation
        # The weight and the subspace's factors in other precisions, brought up to date by `refresh_casts`.
        self.casts: dict[torch.dtype, Tensor] = {}
        self.factor_casts: dict[torch.dtype, tuple[Subspace, Tensor, Tensor]] = {}
        self.dtype = torch.promote_types(parameter.dtype, torch.float32)
        self._released: tuple[weakref.ref[Tensor], int] | None = None  # the last step's gradient, and its version

    @property
    def in_use(self) -> nn.Parameter:
        """The parameter that the module computes with: a sharded one's gathered counterpart, while there is one."""
        return self.parameter if self._in_use is None else self._in_use()

    @property
    def value(self) -> Tensor:
        """The weight that the module computes with, cut off from autograd: its own gradient is never wanted."""
        parameter = self.in_use
        if self.sharded and is_sharded(parameter):
            raise PrivacyError(
                f"parameter '{self.name}' is sharded, and was asked for while it was not gathered: call the model "
                "itself (model(x), not model.forward(x)), and use a weight in no module that fully_shard does not "
                "gather it for"
            )
        weight = parameter.detach()
        return weight if self.narrow is None else weight.narrow(*self.narrow)

    @property
    def own_rows(self) -> slice:
        """Of the weight's rows (its first dimension) those that are this rank's: all, where it is not sharded."""
        rows = own_rows(self.parameter)
        if self.narrow is None or self.narrow[0] != 0:
            return rows
        _, start, length = self.narrow
        first, end = (min(max(row - start, 0), length) for row in (rows.start, rows.stop))
        return slice(first, end)

    @property
    def own(self) -> Tensor:
        """The own rows of the weight, cut off from autograd."""
        return self.part_of(own(self.parameter))

    def part_of(self, rows: Tensor) -> Tensor:
        """Of the parameter's own rows (or a tensor like them) what belongs to this slot: all, or its part of them."""
        if self.narrow is None:
            return rows
        dimension, start, length = self.narrow
        if dimension != 0:
            return rows.narrow(dimension, start, length)
        mine = self.own_rows
        first = max(start - own_rows(self.parameter).start, 0) if mine.stop > mine.start else 0
        return rows[first : first + mine.stop - mine.start]

    def value_as(self, dtype: torch.dtype) -> Tensor:
        """The weight in the precision that a layer computes in, cast once per logical step; a sharded one, of which
        nothing whole is kept, at each call."""
        if self.sharded:
            return self.value.to(dtype)
        if dtype == self.parameter.dtype:
            return self.value
        if dtype not in self.casts:
            self.casts[dtype] = self.value.to(dtype)
        return self.casts[dtype]

    def factors_as(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Row and column factor of the subspace in that precision, cast once per logical step."""
        space = self.subspace
        assert space is not None
        if dtype == space.left.dtype or torch.compiler.is_compiling():  # a compiler casts at no cost
            return space.row_factor.to(dtype), space.column_factor.to(dtype)
        if dtype not in self.factor_casts or self.factor_casts[dtype][0] is not space:
            self.factor_casts[dtype] = (space, space.row_factor.to(dtype), space.column_factor.to(dtype))
        return self.factor_casts[dtype][1:]

    def moved_by(self, carriers: tuple[Tensor, ...]) -> Tensor:
        """The weight, moved by one sample's carriers: differentiated by them, anything computed with it gives what a
        rule would leave there."""
        space = self.subspace
        if space is None:
            return (self.value + carriers[0]).to(self.value.dtype)
        d_left, d_right = space.unpack(*carriers)
        move = d_left @ space.right + space.left @ d_right
        return (self.value + (move.mT if space.transposed else move).reshape(self.value.shape)).to(self.value.dtype)

    @property
    def dimensions(self) -> int:
        """How many numbers a sample's gradient has here, which is also how many get noise."""
        if self.subspace is not None:
            return sum(shape[1] * shape[2] for shape in self.shapes(1))
        return self.shape.numel() if self.elements_kept is None else self.elements_kept.numel()

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        """Shapes of the carriers of a micro-batch."""
        space = self.subspace
        if space is None:
            return [(batch, *self.shape)]
        rows = space.row_factor.shape[0] if space.rows_kept is None else space.rows_kept.indices.numel()
        columns = space.column_factor.shape[1] if space.columns_kept is None else space.columns_kept.indices.numel()
        return [(batch, space.rank, rows), (batch, space.rank, columns)]

    def prepare(self, batch: int) -> None:
        """Carriers for a micro-batch of this size, without gradients; the ones there are kept where they fit."""
        shapes = self.shapes(batch)
        if [carrier.shape for carrier in self.carriers] == shapes:
            return self.clear()
        known = [*self._replaced, *map(weakref.ref, self.carriers), weakref.ref(self.calls)]
        self._replaced = [reference for reference in known if reference() is not None]
        self.calls = Calls()
        self.carriers = tuple(zeros(shape, self.dtype, self.device) for shape in shapes)

    def clear(self) -> None:
        """Drop gradients, and keep the carriers."""
        for carrier in self.carriers:
            carrier.grad = None
        self.calls.clear()
        self._replaced.clear()

    def renew(self) -> None:
        """Let go of the carriers, so that a late backward of a forward so far cannot reach the next micro-batch."""
        self.carriers, self.calls = (), Calls()
        self._replaced.clear()

    def call(self, x: Tensor, *, stored_inputs_first: bool) -> Call | None:
        """For a layer that multiplies x (B, ..., in) with this weight: where to leave x and the output's gradient. None
        where the product of both has to go to the carrier."""
        shape = self.shape
        if self.layout is not None or len(shape) != 2 or not untransformed():
            return None
        outputs = shape[1] if stored_inputs_first else shape[0]
        if not outer.is_faster(x, outputs):
            return None
        y_shape = (*x.shape[:-1], outputs)
        return self.calls.begin(y_shape, x.dtype, x.device, stored_inputs_first=stored_inputs_first)

    @property
    def missed(self) -> bool:
        """Whether a backward pass has left gradients in carriers of this micro-batch that were replaced since."""
        for reference in self._replaced:
            place = reference()
            if place is not None and (place.pending if isinstance(place, Calls) else place.grad is not None):
                return True
        return False

    @property
    def pending(self) -> bool:
        """Whether a backward pass has left per-sample gradients here."""
        return any(c.grad is not None for c in self.carriers) or self.calls.pending

    def gradients(self) -> list[Tensor]:
        """Per-sample gradients of the kept entries as layers left them; zeros where a carrier was not reached."""
        products = self.calls.products(self.name)
        if products is None:
            return [c.grad if c.grad is not None else torch.zeros_like(c) for c in self.carriers]
        (carrier,) = self.carriers
        return [products.materialize() if carrier.grad is None else products.materialize() + carrier.grad]

    def parts(self) -> list[Tensor] | list[OuterProducts]:
        """The same as matrices (B, ...), `dimensions` columns in all, scaled as they enter the norm; factored where
        the whole gradient is."""
        products = self.calls.products(self.name)
        if products is not None and self.carriers[0].grad is None:
            return [replace(products, kept=self.elements_kept, scale=self.scale)]
        flat = [gradient.reshape(gradient.shape[0], -1) for gradient in self.gradients()]  # a scalar's have no columns
        if self.elements_kept is not None:
            flat = [flat[0].index_select(1, self.elements_kept)]
        return flat if self.scale == 1.0 else [part * self.scale for part in flat]

    def inspect(self) -> Tensor | tuple[Tensor, Tensor]:
        """Per-sample gradients at full size: (B, *shape), or (B, m, r) and (B, r, n); masked entries are zero."""
        if self.subspace is not None:
            return self.subspace.unpack(*self.gradients())
        (dense,) = self.gradients()
        if self.elements_kept is None:
            return dense
        kept = dense.flatten(1).index_select(1, self.elements_kept)
        return torch.zeros_like(dense.flatten(1)).index_copy(1, self.elements_kept, kept).view_as(dense)

    def spread(self, vector: Tensor) -> Tensor:
        """A (noisy) sum of `dimensions` numbers of a dense slot -> the gradient for the whole parameter (part)."""
        if self.elements_kept is not None:
            vector = vector.new_zeros(self.shape.numel()).index_copy(0, self.elements_kept, vector)
        return vector.view(self.shape)

    def mark_released(self) -> None:
        """The parameter's `.grad` is a step's noisy gradient."""
        gradient = self.parameter.grad
        self._released = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def is_released(self, gradient: Tensor) -> bool:
        """Whether this is that gradient, and nothing was added to it since."""
        if self._released is None:
            return False
        last, version = self._released
        return last() is gradient and gradient._version == version

    @contextmanager
    def borrowed(self, carriers: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        """Use other carriers for a while (one sample's slice of them inside vmap)."""
        own, self.carriers = self.carriers, carriers
        try:
            yield carriers
        finally:
            self.carriers = own

    def apart(self) -> AbstractContextManager[tuple[Tensor, ...]]:
        """Use new carriers like these for a while: ones that no forward so far has seen."""
        return self.borrowed(tuple(zeros(tuple(c.shape), c.dtype, c.device) for c in self.carriers))


class Recordable(Protocol):
    """What a recording of forward and backward needs of a slot, or of what stands for one."""

    calls: Calls

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> nn.Parameter: ...

    @property
    def carriers(self) -> tuple[Tensor, ...]: ...

    @property
    def pending(self) -> bool: ...

    def apart(self) -> AbstractContextManager[tuple[Tensor, ...]]: ...


@contextmanager
def calls_apart(slots: Iterable[Recordable]) -> Iterator[list[Calls]]:
    """Forwards run here leave no calls with the slots but in records of their own, one a slot, with all carriers."""
    own = [(slot, slot.calls) for slot in slots]
    apart = [Calls(remember=True) for _ in own]
    for (slot, _), calls in zip(own, apart, strict=True):
        slot.calls = calls
    try:
        yield apart
    finally:
        for slot, calls_before in own:
            slot.calls = calls_before


@torch.no_grad()
def refresh_casts(slots: Iterable[Slot]) -> None:
    """Bring casts up to date, in place: the weights have changed, and subspaces with them."""
    pairs = []
    for slot in slots:
        pairs += [(cast, slot.value) for cast in slot.casts.values()]
        for space, rows, columns in slot.factor_casts.values():
            pairs += [(rows, space.row_factor), (columns, space.column_factor)] if space is slot.subspace else []
    if pairs:
        casts, values = zip(*pairs, strict=True)
        torch._foreach_copy_(casts, values)
