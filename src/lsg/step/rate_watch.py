"""Learning rates at each step in; a warning out where somebody steps a scheduler once for each micro-batch."""

import warnings
from typing import Any


class RateWatch:
    """Looks at the learning rates of a logical batch's micro-batches: an update is made with the last one alone."""

    def __init__(self) -> None:
        self._rates: list[float] | None = None  # at the last micro-batch of a logical batch that is under way
        self._told = False

    def look(self, groups: list[dict[str, Any]], *, ends_logical_batch: bool) -> None:
        """Call it at each step. Rates that are tensors, which a GPU would have to be asked for, are not looked at."""
        if self._told:
            return
        rates = [group["lr"] for group in groups if isinstance(group.get("lr"), float | int)]
        if self._rates is not None and self._rates != rates:
            self._told = True
            warnings.warn(
                "the learning rate changed between two micro-batches of one logical batch: a scheduler is stepped for "
                "each of them, so that its schedule ends early. Step it where optimizer.stepped is True, and plan it "
                "for loader.steps(epochs) steps",
                stacklevel=4,
            )
        self._rates = None if ends_logical_batch else rates
