"""ε as text, rounded up, so that the printed guarantee is never stronger than the true one."""

import math


def epsilon_text(epsilon: float | None) -> str:
    """Two decimals, rounded up. None stands for an infinite ε, as in JSON."""
    return "∞" if epsilon is None or epsilon == math.inf else f"{math.ceil(100 * epsilon - 1e-9) / 100:.2f}"
