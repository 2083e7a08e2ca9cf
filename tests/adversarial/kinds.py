"""All operations there are. Each file registers its own when it is imported, in this order: seeds depend on it."""

# isort: off
from tests.adversarial import layouts, modules, layers, changing  # noqa: F401
from tests.adversarial import mixing, mixing_modules, mixing_aside  # noqa: F401

# isort: on
from tests.adversarial.ops import CLEAN, MIXING

__all__ = ["CLEAN", "MIXING"]
