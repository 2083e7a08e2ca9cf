"""A loss that the model itself computes, checked by value: that of a batch must be the mean (or sum) of its records'.

The model runs on up to three records together and on each alone, with labels masked to different numbers of
tokens, and once with a record that has none left: lengths that happen to be equal hide a mean over all tokens.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lsg.errors import PrivacyError
from lsg.losses import IGNORED, Reduction

_ROWS = 3
_Kept = tuple[int | None, ...]  # how many of each record's labels count; the rest are masked. None means all
_OFTEN_IGNORED = (IGNORED, -1, 0, 255)  # transformers; also seen; padding tokens; segmentation
_WAY_OUT = (
    "let the model return a mean of losses that each belong to one record, or logits (called without labels) for which "
    "lsg.losses.per_sequence(logits, labels) computes such a mean. A loss that compares records with each other, as "
    "contrastive ones do, cannot be trained privately, inside the model or outside"
)


def check_loss(
    model: nn.Module,
    run: Callable[..., Any],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    size: int,
    reduction: Reduction = "mean",
) -> bool:
    """Raise PrivacyError if a loss that `model` returns for a batch is not the mean (or sum) of its records' losses.

    run: the model's forward without per-sample rules; it is called with gradients on, and nothing is differentiated.
    inputs: args and kwargs of a call with `size` records. reduction: make_private's `loss_reduction`.
    Returns whether there was a loss to check: a number that requires a gradient, among the results. False, too, for
    one record. Random numbers are drawn apart, and the mode of each module is put back. Buffers are not.
    """
    if size < 2:
        return False
    probe = _Probe(model, run, inputs, size)
    with torch.random.fork_rng(devices=_cuda_devices(model)), torch.enable_grad(), _evaluating(model) as evaluating:
        try:
            if not probe.returns_loss():
                evaluating.stop()  # it may compute one in training mode only
                if not probe.returns_loss():
                    return False
            if not probe.is_repeatable():
                _warn_of_random_loss(model)
                return True
            if not probe.adds_up(reduction):
                _refuse(model, reduction)
        except _CannotRunError as error:
            evaluating.stop()
            if not probe.whole_batch_has_loss():
                return False
            raise PrivacyError(
                f"{_name(model)} returns a loss, but does not run on a few records of the batch alone ({error}), so "
                f"lsg cannot see that it keeps records apart: {_WAY_OUT}"
            ) from error
    return True


def _warn_of_random_loss(model: nn.Module) -> None:
    warnings.warn(
        f"{_name(model)} draws random numbers for the loss that it returns, so lsg cannot compare the loss of a batch "
        f"with those of its records: {_WAY_OUT}",
        stacklevel=3,
    )


def _refuse(model: nn.Module, reduction: Reduction) -> None:
    raise PrivacyError(
        f"the loss that {_name(model)} returns for a batch is not the {reduction} of the losses of its records (a mean "
        "over all tokens of the batch, say), so that a record's gradient depends on the others and clipping would not "
        f"bound its influence: {_WAY_OUT}"
    )


def _name(model: nn.Module) -> str:
    return f"the model ({type(model).__name__})"


class _Probe:
    """A model and the first few records of a batch, on which to run it."""

    def __init__(
        self, model: nn.Module, run: Callable[..., Any], inputs: tuple[Any, dict[str, Any]], size: int
    ) -> None:
        self._model, self._run, self._size = model, run, size
        self._rows, self._tolerance = min(_ROWS, size), _tolerance(model)
        args, kwargs = inputs
        names = _argument_names(run, len(args))
        self._inputs = {f"{i}:{name}": value for i, (name, value) in enumerate(zip(names, args, strict=True))}
        self._positional, self._named = list(self._inputs), list(kwargs)
        self._inputs |= kwargs
        self._positions: list[int] | None = None  # of losses among the results

    def losses(self, rows: slice, kept: _Kept = (), mask: int = IGNORED, seed: int = 0) -> list[Tensor]:
        """Numbers among the results for these of the records that can be differentiated."""

        def cut(name: str, value: Tensor) -> Tensor:
            if value.dim() == 0 or value.shape[0] != self._size:
                return value.clone()
            few = value[: self._rows].clone()
            for record, count in zip(few, kept, strict=False):
                if count is not None and _is_labels(name, value):
                    record[..., count:] = mask
            return few[rows]

        torch.manual_seed(seed)
        try:
            return self._losses(_named_map(cut, self._inputs))
        except PrivacyError:
            raise
        except Exception as error:
            raise _CannotRunError(str(error)) from error

    def _losses(self, inputs: dict[str, Any]) -> list[Tensor]:
        named = {name: inputs[name] for name in self._named}
        output = self._run(*(inputs[name] for name in self._positional), **named)
        found = list(_tensors(output))
        if self._positions is None:  # among several records: a record alone may have results of one number, too
            single = [t.numel() == 1 and t.requires_grad and t.is_floating_point() for t in found]
            self._positions = [i for i, is_loss in enumerate(single) if is_loss]
        return [found[i].detach().reshape(()) for i in self._positions if i < len(found)]

    def returns_loss(self) -> bool:
        self._positions = None
        return bool(self.losses(slice(None)))

    def whole_batch_has_loss(self) -> bool:
        self._positions = None
        try:
            return bool(self._losses(_named_map(lambda name, value: value.clone(), self._inputs)))
        except Exception:  # which the forward that follows will raise, too
            return False

    def is_repeatable(self) -> bool:
        once, again = (self.losses(slice(None), seed=seed) for seed in (0, 1))
        return all(_close(a, b, self._tolerance) for a, b in zip(once, again, strict=True))

    def adds_up(self, reduction: Reduction) -> bool:
        if not self._adds_up((), reduction):
            return False
        for mask in self._masks():
            try:
                if not all(self._adds_up(kept, reduction, mask) for kept in ((None, 4, 2), (None, 0, None))):
                    return False
            except _CannotRunError:  # no label that it knows, so there will be none
                continue
        return True

    def _masks(self) -> set[int]:
        """Labels that may mean that a token does not count. What means no such thing is a label as any other, or the
        model fails; on a GPU that would end the process, so there only those that it is known to take."""
        found: list[Tensor] = []
        _named_map(lambda name, value: found.append(value) if _is_labels(name, value) else None, self._inputs)
        if not found:
            return set()
        configs = [
            module.config for module in self._model.modules() if _of_transformers(module) and _has_config(module)
        ]
        known = {getattr(config, "semantic_loss_ignore_index", IGNORED) for config in configs}
        if all(labels.device.type == "cpu" for labels in found):
            return known | set(_OFTEN_IGNORED)
        return known | {mask for mask in _OFTEN_IGNORED if all(bool((labels == mask).any()) for labels in found)}

    def _adds_up(self, kept: _Kept, reduction: Reduction, mask: int = IGNORED) -> bool:
        together = self.losses(slice(None), kept, mask)
        alone = [self.losses(slice(i, i + 1), kept, mask) for i in range(self._rows)]
        if any(len(one) != len(together) for one in alone):
            return False
        return all(
            _equals(batch, torch.stack(records), reduction, self._tolerance, one_is_empty=0 in kept)
            for batch, *records in zip(together, *alone, strict=True)
        )


class _CannotRunError(Exception):
    """The model raised an error on a few records."""


def _equals(batch: Tensor, records: Tensor, reduction: Reduction, tolerance: float, *, one_is_empty: bool) -> bool:
    if one_is_empty:
        if not batch.isfinite():  # a record without labels is 0/0 to this loss, which cannot be trained on
            return True
        records = records.nan_to_num(0.0)  # alone it is 0/0; among others it counts in the divisor, and nowhere else
    if all(
        _close(batch, record, tolerance) for record in records
    ):  # no function of the records: a trained temperature, say
        return True
    return _close(batch, records.mean() if reduction == "mean" else records.sum(), tolerance)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, rtol=tolerance, atol=1e-2 * tolerance, equal_nan=True)


def _tolerance(model: nn.Module) -> float:
    """To what losses of batches of different sizes may differ by, relative to them."""
    some = next(model.parameters())
    if some.device.type != "cpu" or torch.is_autocast_enabled(some.device.type):  # TF32, for one
        return 2e-2
    return {torch.float64: 1e-8, torch.float32: 1e-3}.get(some.dtype, 3e-2)


def _argument_names(run: Callable[..., Any], count: int) -> list[str]:
    try:
        names = list(inspect.signature(run).parameters)[:count]
    except (TypeError, ValueError):
        names = []
    return names + [""] * (count - len(names))


def _is_labels(name: str, value: Tensor) -> bool:
    """Labels of tokens. One label a record is not masked: whoever has none that is, is right."""
    is_label = "label" in name.lower() or "target" in name.lower()
    return is_label and value.dim() > 1 and value.dtype in (torch.int64, torch.int32)


def _of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def _has_config(module: nn.Module) -> bool:
    return getattr(module, "config", None) is not None


def _named_map(change: Callable[[str, Tensor], Any], value: Any, name: str = "") -> Any:
    """Each tensor changed, knowing the nearest name on the way to it."""
    if isinstance(value, Tensor):
        return change(name, value)
    if isinstance(value, Mapping):
        changed = {key: _named_map(change, inside, str(key)) for key, inside in value.items()}
        return changed if type(value) is dict else _rebuilt(value, changed)
    if type(value) in (list, tuple):
        return type(value)(_named_map(change, inside, name) for inside in value)
    return value


def _rebuilt(like: Any, values: dict[str, Any]) -> Any:
    """A mapping of a class of its own (transformers' BatchEncoding), with other values."""
    try:
        return type(like)(values)
    except TypeError:
        return values


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(leaf)


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


class _Evaluating:
    def __init__(self, model: nn.Module) -> None:
        """From now on; `stop` puts each module's own mode back."""
        self._modes = [(module, module.training) for module in model.modules()]
        for module, _ in self._modes:
            module.training = False

    def stop(self) -> None:
        for module, training in self._modes:
            module.training = training


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[_Evaluating]:
    """Without dropout, in which a batch and its records differ. Ends with each module in the mode that it had."""
    evaluating = _Evaluating(model)
    try:
        yield evaluating
    finally:
        evaluating.stop()
