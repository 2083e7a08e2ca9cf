"""Numbers as text that claims no more than was kept."""

import math


def epsilon_text(epsilon: float | None) -> str:
    """Two decimals, rounded up: a printed ε must not promise more than was kept. None is infinite, as in JSON."""
    return "∞" if epsilon is None or epsilon == math.inf else f"{math.ceil(100 * epsilon - 1e-9) / 100:.2f}"
