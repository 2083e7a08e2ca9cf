"""The subspaces of a model's slots: when they are made, and from which weights and random numbers."""

from collections.abc import Sequence
from typing import Any

import torch

from lsg.distributed.group import Group
from lsg.methods import Method
from lsg.parameters.refresh import Refresh
from lsg.parameters.slot import Slot, refresh_casts
from lsg.parameters.stack import Stack


class Subspaces:
    """Made anew when the logical step or a weight has changed; the same ones for all of a logical batch."""

    def __init__(
        self,
        stacks: Sequence[Stack],
        slots: Sequence[Slot],
        method: Method,
        generator: torch.Generator,
        *,
        cuda_graph: bool,
        group: Group | None = None,
    ) -> None:
        self._slots, self._generator = slots, generator
        self._refresh = Refresh(stacks, slots, method, generator, cuda_graph=cuda_graph, group=group)
        self._step = 0  # the logical step that they are for
        self._held = False  # while a logical batch is under way
        self._made_from: tuple[int, ...] | None = None  # `_weights` at the last refresh
        self._before_refresh = generator.get_state()
        self.moves = 0  # how often they have moved in memory: whoever recorded their place has to look again

    @property
    def step(self) -> int:
        """The logical step that the subspaces belong to; before the first refresh, the one they will belong to."""
        return self._step

    def refresh_if_stale(self, *, gradients_wait: bool) -> bool:
        """Make them for this step, unless they are, or a logical batch or waiting gradients need those there are.

        Returns whether slots got new ones (as records; a replayed graph writes new values into the old ones).
        """
        weights = self._weights()
        if self._held or gradients_wait or weights == self._made_from:
            return False
        before = self._generator.get_state()
        try:
            moved = self._refresh(self._step)
            refresh_casts(self._slots)
        except BaseException:  # out of memory, say: whoever tries again gets the same subspaces, and all of them
            self._generator.set_state(before)
            raise
        self._made_from, self._before_refresh = weights, before
        self.moves += moved
        return moved

    def hold(self) -> None:
        """A logical batch is under way: its clipped gradients are sums in these subspaces."""
        self._held = True

    def let_go(self) -> None:
        """The logical batch is given up: the same step may have others."""
        self._held = False

    def end_step(self) -> None:
        """The logical step is over: the next one has others."""
        self._step += 1
        self._held = False

    def _weights(self) -> tuple[int, ...]:
        """Changes with the logical step and with every change of a weight."""
        return (self._step, *(slot.parameter._version for slot in self._slots))

    def state_dict(self) -> dict[str, Any]:
        """The logical step, and the random state that its subspaces are, or will be, made from."""
        made = self._held or self._made_from == self._weights()
        return {"step": self._step, "generator": self._before_refresh if made else self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there: subspaces are made anew, from the same weights and random state, when they are needed."""
        self._step, self._made_from, self._held = state["step"], None, False
        self._generator.set_state(state["generator"])
