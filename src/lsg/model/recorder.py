"""Records the per-sample gradients of a model: carriers for each micro-batch in, gradients for the clipper out.

It owns the slots of the model's trained parameters. The rules that write into them are `attachment.py`'s.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lsg.distributed.group import Group
from lsg.distributed.sharded_model import ShardedModel
from lsg.errors import ConfigurationError, PrivacyError
from lsg.layers.parameter_treatments import Treatment
from lsg.layers.patched_module import Batch
from lsg.methods import Method
from lsg.parameters.outer import OuterProducts
from lsg.parameters.slot import Slot
from lsg.parameters.stack import make_stacks
from lsg.parameters.subspaces import Subspaces
from lsg.perf import PerfConfig, padded_size


class Recorder:
    """The slots of a model, by name and in the order in which a clipped sum has them."""

    def __init__(
        self,
        treatments: Sequence[Treatment],
        method: Method,
        generator: torch.Generator,
        perf: PerfConfig,
        largest_batch: int | None = None,
        untrained: Mapping[str, nn.Parameter] | None = None,
        sharded: ShardedModel | None = None,
    ) -> None:
        """untrained: parameters that the optimizer has and that are frozen; they have to stay so. sharded: the model's
        weights, where they are shared out over ranks."""
        device = generator.device.type
        self._pads, self._largest_batch = perf.fast(device) and perf.pad, largest_batch
        self.slots: dict[str, Slot] = {
            t.name: Slot(
                t.name,
                t.parameter,
                t.layout,
                narrow=t.narrow,
                maskable=t.maskable,
                scale=t.scale,
                in_use=None if sharded is None else sharded.in_use(t.parameter),
            )
            for t in treatments
            if t.kind != "frozen"
        }
        group = Group() if sharded is None else sharded.group
        self.stacks = make_stacks(self.slots.values(), group)
        self._dense = [slot for slot in self.slots.values() if slot.layout is None]
        # The slots as they follow each other in a sum: stack by stack, then the dense ones.
        self.in_order = [slot for stack in self.stacks for slot in stack.slots] + self._dense
        # Where each of them stands among the model's trained parameters.
        self.positions = [list(self.slots).index(slot.name) for slot in self.in_order]
        self._untrained = untrained or {}
        self.batch = Batch()
        self.left_over = False  # whether an earlier micro-batch left gradients that nobody collected or dropped
        self.generator = generator
        slots = list(self.slots.values())
        self.subspaces = Subspaces(self.stacks, slots, method, generator, cuda_graph=perf.graphs(device), group=group)

    # -- before a forward --------------------------------------------------------------------------------------------
    def prepare(self, size: int) -> None:
        """Subspaces for this logical step and carriers for a micro-batch of `size` samples."""
        self._refuse_changes(size)
        rows = padded_size(size, self._largest_batch) if self._pads else size
        refreshed = self.subspaces.refresh_if_stale(gradients_wait=self.pending)
        self.batch.records = size
        if refreshed or rows != self.batch.size:
            self.batch.size = rows
            for slot in self.slots.values():
                slot.prepare(rows)

    def _refuse_changes(self, size: int) -> None:
        if size != self.batch.records and self.pending:
            raise PrivacyError(
                f"a batch of {size} samples came while gradients of {self.batch.records} samples wait: "
                "call optimizer.step() after each loss.backward()"
            )
        if size == 0:
            raise PrivacyError(
                "a batch without samples has no gradients: leave its forward and backward out, and call "
                "optimizer.step() alone for its noisy step (lsg's loader does so by itself)"
            )
        for slot in self.slots.values():
            if not slot.parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter '{slot.name}' was frozen after make_private: freeze parameters before, or detach first"
                )
        for name, parameter in self._untrained.items():
            if parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter '{name}' was unfrozen after make_private, which gave it no rule: unfreeze parameters "
                    "before, or detach first and call make_private again"
                )

    def stop_padding(self) -> None:
        """Gives micro-batches one row for each sample, without padding, from now on."""
        self._pads = False
        self.batch.size = None

    def ready(self) -> dict[str, Slot]:
        """The slots, with the subspaces of the current step."""
        if self.subspaces.refresh_if_stale(gradients_wait=self.pending):
            self.batch.size = None  # carriers are made anew at the next forward
        return self.slots

    def shared_factors(self) -> dict[str, Tensor]:
        """L and R of sharded weights, which all ranks have whole and alike, by what to call them."""
        return {
            f"subspace of '{slot.name}'": torch.cat([slot.subspace.left.flatten(), slot.subspace.right.flatten()])
            for slot in self.slots.values()
            if slot.sharded and slot.subspace is not None
        }

    # -- after a backward --------------------------------------------------------------------------------------------
    @property
    def pending(self) -> bool:
        """Whether a backward pass has left per-sample gradients."""
        return any(slot.pending for slot in self.slots.values())

    @property
    def missed(self) -> bool:
        """Whether a backward pass has left gradients in carriers that were replaced since."""
        return any(slot.missed for slot in self.slots.values())

    @property
    def records(self) -> int | None:
        """Samples of the last micro-batch, without the rows that padding added."""
        return self.batch.records

    def per_sample(self) -> list[list[Tensor] | list[OuterProducts]]:
        """Per-sample gradients after a backward pass: for each slot in order, matrices (B, ...) or their factors."""
        return [slot.parts() for slot in self.in_order]

    def clear(self) -> None:
        """Drop the per-sample gradients of this micro-batch."""
        self.left_over = False
        for slot in self.slots.values():
            slot.clear()

    def renew(self) -> None:
        """Let go of all carriers, so that a late backward of a forward so far cannot reach the next micro-batch."""
        self.left_over = self.left_over or self.pending
        for slot in self.slots.values():
            slot.renew()
        self.batch.size = None

    # -- the logical step --------------------------------------------------------------------------------------------
    def hold_subspaces(self) -> None:
        """A logical batch is under way: its subspaces must not change."""
        self.subspaces.hold()

    def let_go_subspaces(self) -> None:
        """The logical batch under way is given up."""
        self.subspaces.let_go()

    def lift(self, vector: Tensor) -> Iterable[tuple[Slot, Tensor]]:
        """A noisy sum over all slots -> each slot with the gradient of its parameter (or its part): of a sharded one
        this rank's rows."""
        sizes = [stack.dimensions for stack in self.stacks] + [slot.dimensions for slot in self._dense]
        shares = vector.split(sizes)
        for stack, share in zip(self.stacks, shares, strict=False):
            yield from stack.lift(share)
        for slot, share in zip(self._dense, shares[len(self.stacks) :], strict=True):
            yield slot, slot.spread(share)[slot.own_rows] if slot.sharded else slot.spread(share)

    def end_logical_step(self) -> None:
        """Noisy gradients are in the parameters' `.grad`, which is no escape; the next forward gets new subspaces."""
        for slot in self.slots.values():
            slot.mark_released()
        self.subspaces.end_step()
        self.batch.size = None

    def state_dict(self) -> dict[str, Any]:
        """The logical step, and the random state that its subspaces are, or will be, made from."""
        return self.subspaces.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.subspaces.load_state_dict(state)
