"""lsg: differentially private deep learning in a low-rank, sparse gradient space."""

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
