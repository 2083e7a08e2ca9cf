"""Sites: a module whose forward goes through a rule, and how that is put on and taken off again.

The module stays the same object of the same class: only its instance gets a `forward`, a bound method, and a `_lsg`
attribute. On a copy or a pickle of the module both are inert: it behaves as the plain module.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsg.errors import PrivacyError
from lsg.layers.last_cast import LastCast
from lsg.layers.slot import Slot

RuleForward = Callable[..., Any]  # (module, site, *args, **kwargs) -> what the module's own forward would return


class Batch:
    """How many samples the micro-batch in flight has; one object shared by all sites of an engine."""

    def __init__(self, require: Callable[[int], None]) -> None:
        self.size: int | None = None  # that carriers are made for
        self.records: int | None = None  # without the rows that padding adds
        self.rooted = False  # whether the forward in flight began at the model itself
        self.last_cast = LastCast()
        # Whether norms may lay out their output channels last: None before the model was seen to bear it.
        self.channels_last_norms: bool | None = None
        self._require = require

    def require(self, size: int) -> None:
        """Make carriers for `size` samples where a forward begins at a part of the model."""
        if not self.rooted and self.size != size:
            self._require(size)

    @contextmanager
    def of_one(self) -> Iterator[None]:
        """Inside vmap each module sees a batch of one sample."""
        size, rooted, self.size, self.rooted = self.size, self.rooted, 1, True
        try:
            yield
        finally:
            self.size, self.rooted = size, rooted


class Site:
    """What a module's rule needs: its name, its slots by local name, its plain forward and the batch in flight.

    One without slots is there for speed alone, in evaluation too.
    """

    def __init__(self, name: str, slots: dict[str, Slot], batch: Batch, forward: RuleForward, method: str) -> None:
        self.name, self.slots, self.batch, self.rule, self.method = name, slots, batch, forward, method
        self.plain: Callable[..., Any]
        self.caller: nn.Module | None = None  # runs `plain` with other parameter values, where the rule needs that
        self.intercepted = False  # whether calls of functions inside the plain forward have gone through a rule
        self.bypass = False  # True while the module is to run as if it had no rule
        # How this module is used, learnt at its first call and kept, so that sizes that happen to agree cannot flip it.
        self.shared_input: bool | None = None  # indices have no batch dimension (positions)
        self.unclear_input = False  # as many indices as samples were taken for one a sample
        self.batched_inputs: list[bool] | None = None  # which inputs have a batch dimension (vmap fallback)
        self.folds = False  # inputs are flattened (B, k)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return (nothing, ())

    def batch_first(self, x: Tensor, features: int, *, foldable: bool = True) -> Tensor:
        """x as (B, ..., features...), where `features` trailing dimensions belong to the layer.

        A leading 1 is a value shared by all samples and is repeated for each. A leading k*B is a flattened (B, k), as
        some models do before their linear layers; that its rows go sample by sample is checked once
        (`independence.py`). foldable: whether the layer can take more dimensions than B and its features.
        """
        lead = x.shape[0] if x.dim() > features else 0
        if lead > 1 and not self.folds:
            self.batch.require(lead)
        size = self.batch.size
        if size is not None and lead == size:
            return x
        if size is not None and lead == 1:
            return x.expand(size, *x.shape[1:])
        if foldable and size and lead and x.dim() == features + 1 and lead % size == 0:
            self.folds = True
            return torch.unflatten(x, 0, (size, lead // size))
        raise PrivacyError(
            f"layer '{self.name}' got an input of shape {tuple(x.shape)} in a batch of {size} samples: "
            "the first dimension must be the sample (batch first), or samples cannot be told apart"
        )

    def unfold(self, y: Tensor, x: Tensor) -> Tensor:
        """An output for the samples of `batch_first(x)`, in the shape that x had."""
        return y.flatten(0, 1) if x.shape[0] not in (1, y.shape[0]) else y


def site_of(module: nn.Module) -> "Site | None":
    """The site that a module has, if any."""
    site = module.__dict__.get("_lsg")
    assert site is None or isinstance(site, Site)
    return site


def fixed_signature(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an autograd function's signature at hand: PyTorch asks for it at each call, at a layer's cost."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def refuse_double_backward() -> None:
    """Rules give first derivatives only; in a backward pass gradients are on only where a second one is asked for."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise PrivacyError("backward(create_graph=True): per-sample rules have no second derivatives")


def nothing() -> None:
    """What a pickle of a site is loaded as."""


def _through_rule(method: str) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        site: Site | None = self.__dict__["_lsg"]
        if site is None:  # a copy of a private model is a plain model
            return getattr(type(self), method)(self, *args, **kwargs)
        if site.bypass or (site.slots and not torch.is_grad_enabled()):
            return site.plain(*args, **kwargs)
        return site.rule(self, site, *args, **kwargs)

    forward.__name__ = method  # a pickled bound method is looked up by name: the plain one is found
    return forward


_PATCHES = {method: _through_rule(method) for method in ("forward", "compute_bias", "compute_position_bias")}


def is_private(model: nn.Module) -> bool:
    """Whether an engine trains the model or a part of it."""
    sites = (site_of(module) for module in model.modules())
    return any(site is not None and site.slots for site in sites)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody else has put a forward on this instance. A copy of a private module carries an inert one."""
    own = module.__dict__.get("forward")
    return own is not None and not _same_code(own, _PATCHES["forward"])


def _same_code(method: Any, patch: Callable[..., Any]) -> bool:
    """Whether a bound method is the patch, under whatever signature."""
    return getattr(getattr(method, "__func__", None), "__code__", None) is patch.__code__


def install(module: nn.Module, site: Site) -> None:
    """In place of one that is there for speed alone, if there is one."""
    before = site_of(module)
    if before is not None:
        uninstall(module, before)
    site.plain = swap_in(module, site.method, _PATCHES[site.method])
    module.__dict__["_lsg"] = site


def uninstall(module: nn.Module, site: Site) -> None:
    """Nothing where another site has taken its place."""
    if site_of(module) is site:
        del module.__dict__["_lsg"]
        swap_out(module, site.method, site.plain)


def swap_in(module: nn.Module, method: str, patch: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method on this instance alone. Returns what it had, without the inert patch that a copy carries."""
    if _same_code(module.__dict__.get(method), patch):
        del module.__dict__[method]
    plain: Callable[..., Any] = getattr(module, method)
    setattr(module, method, types.MethodType(patch, module))
    return plain


def swap_out(module: nn.Module, method: str, plain: Callable[..., Any]) -> None:
    """Undo `swap_in`."""
    delattr(module, method)
    if getattr(plain, "__func__", None) is not getattr(type(module), method):
        setattr(module, method, plain)  # the instance had a method of its own before
