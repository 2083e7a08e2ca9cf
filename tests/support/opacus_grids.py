"""The layers that Opacus has per-sample gradients for, with the arguments that its tests take: one `Cell` each.

Rebuilt from the ranges that its tests document (opacus/tests/grad_samples of 1.5): every combination of what an
argument can be; sizes (records, lengths, widths) run through their ranges beside them. `batch_first=False` stands for
inputs with the batch second, as Opacus takes them; "inside" for the same layer in a model that gets records first, and
turns them. Opacus itself has 0 to 4 records: here 1 to 4, and one cell with none where it allows that.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, product
from typing import Any

import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention, SequenceBias
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from tests.support.architectures import Call

BatchFirst = bool | str
_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Cell:
    """One layer with its arguments, in a model, and a batch for it.

    batch_first: what `make_private` is told.
    """

    layer: str
    arguments: dict[str, Any]
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    records: int
    batch_first: bool = True


def cells() -> Iterator[Cell]:
    """All of them, layer by layer."""
    yield from _linear()
    for dimensions in (1, 2, 3):
        yield from _conv(dimensions)
    yield from _embedding()
    yield from _embedding_bag()
    yield from _norms()
    yield from _attention()
    yield from _recurrent()
    yield from _sequence_bias()


def _sizes(**ranges: Iterable[int]) -> Iterator[dict[str, int]]:
    """Sizes without end: each runs through its range, at a pace of its own so that they meet in ever new ways."""
    choices = {name: list(values) for name, values in ranges.items()}
    for number in count():
        yield {name: values[number * (1 + place) % len(values)] for place, (name, values) in enumerate(choices.items())}


def _numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, generator=_generator(), dtype=torch.float64)


def _indices(below: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, below, shape, generator=_generator())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _turned(layer: nn.Module) -> nn.Module:
    """The layer gets the batch second, and the model first."""
    return Call(lambda x, inner: inner(x.transpose(0, 1)).transpose(0, 1), layer)


def _cell(layer: str, arguments: dict[str, Any], make: Any, shape: tuple[int, ...], first: BatchFirst = True) -> Cell:
    """A layer of numbers; shape: of a batch, the records first."""
    records, batch = shape[0], _numbers(*shape)
    if first is True:
        return Cell(layer, arguments, make, batch, records)
    if first == "inside":
        return Cell(layer, arguments, lambda: _turned(make()), batch, records)
    return Cell(layer, arguments, make, lambda: batch().transpose(0, 1), records, batch_first=False)


def _linear() -> Iterator[Cell]:
    sizes = _sizes(N=range(1, 5), Z=range(1, 5), H=range(1, 4), W=range(10, 18))
    for dim, bias, first in product((2, 3, 4), (True, False), (True, False, "inside")):
        if dim == 2 and first is not True:
            continue
        for _ in range(4):
            s = next(sizes)
            shape = {2: (s["N"], s["W"]), 3: (s["N"], s["Z"], s["W"]), 4: (s["N"], s["Z"], s["H"], s["W"])}[dim]
            make = lambda width=s["W"], bias=bias: nn.Linear(width, width + 2, bias=bias)  # noqa: E731
            yield _cell("Linear", {"dim": dim, "bias": bias, "batch_first": first} | s, make, shape, first)
    yield _cell("Linear", {"N": 0}, lambda: nn.Linear(10, 12), (0, 10))


def _conv(dimensions: int) -> Iterator[Cell]:
    name = f"Conv{dimensions}d"
    kernels, strides, paddings, dilations, groups, extents = _CONV_RANGES[dimensions]
    sizes = _sizes(N=range(1, 5), **extents)
    for channels, out, kernel, stride, padding, dilation, group in product(
        (1, 3, 32), ("double", "half"), kernels, strides, paddings, dilations, range(1, groups + 1)
    ):
        out_channels = channels * 2 if out == "double" else max(1, channels // 2)
        if (padding == "same" and stride != 1) or channels % group or out_channels % group:
            continue
        options = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation, "groups": group}
        s = next(sizes)
        make = lambda given=options, c=channels, o=out_channels: _CONV[dimensions - 1](c, o, **given)  # noqa: E731
        shape = (s["N"], channels, *(s[extent] for extent in extents))
        yield _cell(name, {"in": channels, "out": out_channels} | options | s, make, shape)
    yield _cell(name, {"N": 0}, lambda: _CONV[dimensions - 1](1, 2, 2), (0, 1, *[6] * dimensions))


# Kernel sizes, strides, paddings, dilations, most groups, extents.
_CONV_RANGES: dict[int, tuple[Any, ...]] = {
    1: ((2, 3), (1, 2), (0, 1, 2, "same", "valid"), (1, 2), 12, {"W": range(6, 11)}),
    2: ((2, 3, 4), (1, 2), (0, 2, "same", "valid"), (1, 2, 3), 16, {"H": range(11, 18), "W": range(11, 18)}),
    3: (
        (2, 3, (1, 2, 3)), (1, 2, (1, 2, 3)), (0, 2, (1, 2, 3), "same", "valid"), (1, (1, 2, 2)), 16,
        {"D": range(3, 7), "H": range(6, 11), "W": range(6, 11)},
    ),
}  # fmt: skip


def _embedding() -> Iterator[Cell]:
    sizes = _sizes(N=range(1, 5), T=range(1, 6), Q=range(1, 5), R=range(1, 3), V=range(2, 33), D=range(10, 18))
    for dim, first in product((2, 3, 4), (True, False, "inside")):
        for _ in range(12):
            s = next(sizes)
            shape = tuple(s[key] for key in "NTQR"[:dim])
            arguments = {"dim": dim, "batch_first": first} | s
            make = lambda s=s: nn.Embedding(s["V"], s["D"])  # noqa: E731
            batch = _indices(s["V"], *shape)
            if first is False:
                turned = lambda batch=batch: batch().transpose(0, 1)  # noqa: E731
                yield Cell("Embedding", arguments, make, turned, s["N"], batch_first=False)
            else:
                model = make if first is True else lambda make=make: _turned(make())
                yield Cell("Embedding", arguments, model, batch, s["N"])
    yield Cell("Embedding", {"N": 0}, lambda: nn.Embedding(5, 10), _indices(5, 0, 3), 0)


class _Bags(nn.Module):
    """An EmbeddingBag as Opacus's test calls it: all bags in one row, told apart by offsets."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        out = self.bag(*inputs)
        assert isinstance(out, Tensor)
        return out


def _embedding_bag() -> Iterator[Cell]:
    sizes = _sizes(N=range(4, 9), most=range(3, 8), V=range(10, 33), D=range(10, 18))
    for mode, kind in product(("sum", "mean"), ("offsets", "rows")):
        for _ in range(10):
            s = next(sizes)
            options = {"mode": mode, "padding_idx": 0 if kind == "rows" else None}
            make = lambda s=s, options=options: nn.EmbeddingBag(s["V"], s["D"], **options)  # noqa: E731
            model = make if kind == "rows" else lambda make=make: _Bags(make())
            batch = lambda s=s, kind=kind: _bags(s, kind)  # noqa: E731
            yield Cell("EmbeddingBag", {"mode": mode, "bags": kind} | s, model, batch, s["N"])


def _bags(s: dict[str, int], kind: str) -> Any:
    """Bags of different sizes: a row of indices and offsets, or a row each, filled up with 0."""
    lengths = torch.randint(1, s["most"] + 1, (s["N"],), generator=_generator())
    bags = [torch.randperm(s["V"] - 1, generator=_generator())[:n] + 1 for n in lengths.tolist()]
    if kind == "rows":
        return nn.utils.rnn.pad_sequence(bags, batch_first=True)
    return torch.cat(bags), lengths.cumsum(0) - lengths


def _norms() -> Iterator[Cell]:
    sizes = _sizes(N=range(1, 5), C=range(1, 9), H=range(5, 11), W=range(4, 9))
    for groups in (1, 4, "C"):
        for _ in range(24):
            s = next(sizes)
            number = s["C"] if groups == "C" else int(groups)
            if s["C"] % number == 0:
                make = lambda number=number, s=s: nn.GroupNorm(number, s["C"])  # noqa: E731
                yield _cell("GroupNorm", {"groups": groups} | s, make, (s["N"], s["C"], s["H"], s["W"]))
    yield _cell("GroupNorm", {"N": 0}, lambda: nn.GroupNorm(1, 2), (0, 2, 5, 4))
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    for dimensions, norm in enumerate(instance, start=1):
        sizes = _sizes(N=range(1, 5), C=range(1, 4), Z=range(1, 5), H=range(4, 9), W=range(5, 11))
        for _ in range(24):
            s = next(sizes)
            shape = (s["N"], s["C"], *(s[key] for key in "ZHW"[3 - dimensions :]))
            yield _cell(norm.__name__, s, lambda norm=norm, s=s: _plain_gradients(norm(s["C"], affine=True)), shape)
    for name, norm_class in (("LayerNorm", nn.LayerNorm), ("RMSNorm", nn.RMSNorm)):
        sizes = _sizes(N=range(1, 5), Z=range(1, 5), H=range(1, 4), W=range(5, 11))
        for dim, over in product((2, 3, 4), (1, 2, 3)):
            for _ in range(8 if over < dim else 0):
                s = next(sizes)
                shape = tuple(s[key] for key in ("NW", "NZW", "NZHW")[dim - 2])
                make = lambda norm_class=norm_class, inner=shape[-over:]: norm_class(inner)  # noqa: E731
                yield _cell(name, {"dim": dim, "over": over} | s, make, shape)


def _plain_gradients(norm: nn.Module) -> nn.Module:
    """PyTorch's own instance norm is wrong for gradients that are laid out otherwise (`layers/group_norm.py`)."""
    return Call(lambda x, inner: _laid_out_plainly(inner(x)), norm)


def _laid_out_plainly(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.contiguous())
    return y


def _attention() -> Iterator[Cell]:
    sizes = _sizes(N=range(1, 5), T=range(16, 21))
    switches = (True, False)
    for kind, heads, bias, bias_kv, zero, separate, first in product(
        (DPMultiheadAttention, nn.MultiheadAttention), (1, 2), switches, switches, switches, switches, (False, "inside")
    ):
        if kind is nn.MultiheadAttention and first is False:
            continue  # Opacus has no rule for it; in a model that gets records first it is the same layer
        s = next(sizes)
        options = {"bias": bias, "add_bias_kv": bias_kv, "add_zero_attn": zero, "batch_first": first == "inside"}
        options |= {"kdim": 4, "vdim": 4} if separate else {}
        make = lambda kind=kind, heads=heads, options=options: Call(  # noqa: E731
            lambda x, inner: inner(*x.unbind(-1))[0], kind(4, heads, **options)
        )
        arguments = {"heads": heads} | options | {"batch_first": first} | s
        yield _cell(kind.__name__, arguments, make, (s["N"], s["T"], 4, 3), first == "inside")


def _recurrent() -> Iterator[Cell]:
    sizes = _sizes(N=range(1, 4), T=range(1, 4), D=range(4, 6), H=range(8, 11))
    for kind, layers, bias, both, packed, first in product(
        (DPRNN, DPGRU, DPLSTM), (1, 2), (True, False), (True, False), ("no", "sorted", "unsorted"),
        (True, False, "inside"),
    ):  # fmt: skip
        if packed != "no" and first == "inside":
            continue
        options = {"num_layers": layers, "bias": bias, "bidirectional": both, "batch_first": first is True}
        for _ in range(2):
            s = next(sizes)
            make = lambda kind=kind, s=s, options=options: Call(  # noqa: E731
                lambda x, inner: _data(inner(x)[0]), kind(s["D"], s["H"], **options)
            )
            arguments = {"packed": packed} | options | {"batch_first": first} | s
            if packed == "no":
                yield _cell(kind.__name__, arguments, make, (s["N"], s["T"], s["D"]), first)
            else:
                batch = lambda s=s, packed=packed: _packed(s, packed == "sorted")  # noqa: E731
                yield Cell(kind.__name__, arguments, make, batch, s["N"], batch_first=bool(first))


def _data(out: Tensor | PackedSequence) -> Tensor:
    return out.data if isinstance(out, PackedSequence) else out


def _packed(s: dict[str, int], in_order: bool) -> PackedSequence:
    lengths = torch.randint(1, s["T"] + 1, (s["N"],), generator=_generator())
    lengths = lengths.sort(descending=True).values if in_order else lengths
    x = torch.randn(s["N"], s["T"], s["D"], dtype=torch.float64, generator=_generator())
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)


def _sequence_bias() -> Iterator[Cell]:
    sizes = _sizes(N=range(1, 5), T=range(10, 21), D=range(4, 9))
    for first in (True, False, "inside"):
        for _ in range(12):
            s = next(sizes)
            make = lambda s=s, first=first: SequenceBias(s["D"], batch_first=first is True)  # noqa: E731
            yield _cell("SequenceBias", {"batch_first": first} | s, make, (s["N"], s["T"], s["D"]), first)
    yield _cell("SequenceBias", {"N": 0}, lambda: SequenceBias(4, batch_first=True), (0, 10, 4))
