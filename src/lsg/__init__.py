"""lsg: differentially private deep learning in a low-rank, sparse gradient space."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsg import losses
    from lsg.checkpoint import load_checkpoint, save_checkpoint
    from lsg.engine import PrivacyEngine
    from lsg.errors import BudgetExceeded, ConfigurationError, LsgError, PrivacyError
    from lsg.explain import explain
    from lsg.fix import fix
    from lsg.methods import DPSGD, LSG, RGP, NonPrivate, SparseDPSGD
    from lsg.perf import PerfConfig
    from lsg.recipes import Recipe, recommend
    from lsg.schedules import Constant, Ramp, SwitchOn
    from lsg.step.averaging import WeightAverage

__version__ = "0.1.0"
__all__ = [
    "DPSGD",
    "LSG",
    "RGP",
    "BudgetExceeded",
    "ConfigurationError",
    "Constant",
    "LsgError",
    "NonPrivate",
    "PerfConfig",
    "PrivacyEngine",
    "PrivacyError",
    "Ramp",
    "Recipe",
    "SparseDPSGD",
    "SwitchOn",
    "WeightAverage",
    "explain",
    "fix",
    "load_checkpoint",
    "losses",
    "recommend",
    "save_checkpoint",
]

# Where each public name stands. It is loaded when it is first asked for: the command line's help needs no PyTorch.
_HOMES = {
    "lsg.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "lsg.engine": ("PrivacyEngine",),
    "lsg.errors": ("BudgetExceeded", "ConfigurationError", "LsgError", "PrivacyError"),
    "lsg.explain": ("explain",),
    "lsg.fix": ("fix",),
    "lsg.methods": ("DPSGD", "LSG", "RGP", "NonPrivate", "SparseDPSGD"),
    "lsg.perf": ("PerfConfig",),
    "lsg.recipes": ("Recipe", "recommend"),
    "lsg.schedules": ("Constant", "Ramp", "SwitchOn"),
    "lsg.step.averaging": ("WeightAverage",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "losses":
        return import_module("lsg.losses")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'lsg' has no attribute '{name}'")
    found = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps `lsg.explain` and `lsg.fix` the functions, where Python, importing files of these names, puts modules."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME_OF):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
