"""Counts each step of a run before its noise is drawn: against the target, in the ledger, in the accountant."""

import secrets
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lsg.accounting.accountant import Accountant, create_accountant
from lsg.accounting.ledger import BEGINNING, FRESH, Ledger, Record, fingerprint, seal
from lsg.accounting.phases import Phase
from lsg.accounting.shared_ledger import SharedLedger
from lsg.distributed.group import Group
from lsg.distributed.sharding import is_sharded
from lsg.errors import BudgetExceeded, ConfigurationError, PrivacyError
from lsg.sampling.plan import SamplingPlan
from lsg.sampling.random_sources import NoiseSource


@dataclass(frozen=True)
class Release:
    """What a step is about to release, before its noise is drawn.

    epoch: the number of the loader's epoch that the batch belongs to; None if the batch did not come from the loader.
    weights: the trained parameters, as they are before the step.
    total: the clipped sum of the logical batch, without noise; None if no record was drawn.
    noise: where the noise will come from; None for gradients that get none.
    """

    noise_multiplier: float
    epoch: int | None
    weights: Sequence[Tensor]
    total: Tensor | None
    noise: NoiseSource | None


class Target:
    """Stops a run before the step that would pass a target epsilon.

    planned: the steps that the noise was calibrated for. They are never stopped, and no ε is computed while they last.
    """

    def __init__(self, accountant: Accountant, *, epsilon: float, delta: float, planned: Phase) -> None:
        self._accountant, self._epsilon, self._delta = accountant, epsilon, delta
        self.planned = planned
        # How many steps of the present noise and rate are allowed beside all others.
        self._kind: tuple[Any, ...] = (*planned[:2], Counter())
        self._allowed, self._ahead = planned.steps, 1

    def facts(self) -> tuple[float, float]:
        return self._epsilon, self._delta

    def check(self, noise_multiplier: float, sample_rate: float) -> None:
        others = _totals(self._accountant)
        taken = others.pop((noise_multiplier, sample_rate), 0)
        if self._kind != (noise_multiplier, sample_rate, others):
            self._kind, self._allowed, self._ahead = (noise_multiplier, sample_rate, others), taken, 1
        if taken < self._allowed:
            return
        # Asks for the ε of one step ahead, then of two, four, ..., so that many steps of one kind need few answers.
        # When so many no longer fit, asks for half as many.
        while not self._fits(Phase(noise_multiplier, sample_rate, self._ahead)):
            if self._ahead == 1:
                cause = ""
                if sample_rate > self.planned.sample_rate:
                    cause = (
                        ". The private loader did not hand out its batch, so it counts as one on all records: iterate "
                        "over the loader that make_private returned"
                    )
                raise BudgetExceeded(
                    f"after {len(self._accountant)} steps the next one would pass target_epsilon={self._epsilon:g} at "
                    f"delta={self._delta:g}: training ends here, and nothing of this batch was released{cause}"
                )
            self._ahead //= 2
        self._allowed, self._ahead = taken + self._ahead, 2 * self._ahead

    def _fits(self, steps: Phase) -> bool:
        return self._accountant.epsilon_after(steps, self._delta) <= self._epsilon


class StepAccounting:
    """Counts each logical step at the sampling plan's rate, if the target allows it: first in the ledger, then in the
    accountant. Every rank of a group keeps the same books; the ledger is rank 0's.

    replayable: whether the noise can be drawn again from a saved state. Such noise is a stream that has a name.
    """

    def __init__(
        self,
        accountant: Accountant,
        plan: SamplingPlan,
        *,
        ledger: Ledger | None,
        replayable: bool = True,
        group: Group | None = None,
    ) -> None:
        group = self._group = group or Group()
        self.accountant, self._plan = accountant, plan
        self._ledger = None if ledger is None else SharedLedger(ledger, group)
        self.target: Target | None = None
        self._stream: str = group.on_first(lambda: secrets.token_hex(8)) if replayable else FRESH
        self._counted: tuple[int, float] | None = None  # the epoch and noise that a full-rate step stands for

    def count(self, release: Release) -> None:
        """Count the step that makes this release. Raises BudgetExceeded instead if it would pass the target."""
        noise_multiplier, epoch = release.noise_multiplier, release.epoch
        rate = 1.0  # nothing is known of how a batch from elsewhere was drawn: no amplification
        if epoch is None and noise_multiplier:
            warnings.warn(
                "a step on a batch that the private loader did not hand out: it is accounted as if every record were "
                "in it, which costs far more ε. Iterate over the loader that make_private returned",
                stacklevel=3,
            )
        if epoch is not None and self._plan.poisson:
            rate = self._plan.sample_rate
        elif epoch is not None and self._counted == (epoch, noise_multiplier):
            # Without Poisson sampling a record enters one step of an epoch, unamplified: the epoch's first step counts
            # for all of them. A step with other noise counts for itself.
            return
        if self.target is not None:
            self.target.check(noise_multiplier, rate)
        if self._ledger is not None:
            weights = _weights(release, self._group)
            self._record(noise_multiplier, rate, lambda: {"weights": weights(), "sum": _seal(release)})
        self.accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
        if not self._plan.poisson and epoch is not None:
            self._counted = (epoch, noise_multiplier)

    def _record(self, noise_multiplier: float, rate: float, fingerprints: Callable[[], dict[str, str]]) -> None:
        assert self._ledger is not None
        known = {"noise_multiplier": noise_multiplier, "sample_rate": rate, "stream": self._stream}
        self._ledger.record(lambda: known | fingerprints())  # which cost time, on rank 0 alone

    def state_dict(self) -> dict[str, Any]:
        """Everything spent, what the epoch under way has been counted for, and the place in the ledger."""
        ledger = self._ledger
        if ledger is None and self._stream == FRESH:
            raise ConfigurationError(
                "secure_mode=True: steps after a saved state cannot be repeated, and without a ledger nobody would "
                "know that they must be charged: make PrivacyEngine(secure_mode=True, ledger=...)"
            )
        return {
            "accountant": self.accountant.state_dict(),
            "counted": self._counted and list(self._counted),
            "stream": self._stream,
            "ledger": ledger and {"position": ledger.position, "chain": ledger.chain},
        }

    def facts(self) -> tuple[Any, ...]:
        """What all ranks must have alike of their books: the history, the target, and whether there is a ledger."""
        return tuple(map(tuple, self.accountant.history)), self.target and self.target.facts(), self._ledger is not None

    def check(self, state: dict[str, Any]) -> None:
        """Refuse books that forget what was spent: by this engine, or by the ledger. Nothing is changed."""
        saved = create_accountant(self.accountant.name)
        saved.load_state_dict(state["accountant"])
        if not _totals(self.accountant) <= _totals(saved):
            raise PrivacyError(
                f"the saved run has spent {len(saved)} steps, but this engine has spent {len(self.accountant)} "
                "already, which loading it would forget: load it into a new engine"
            )
        if len(self.accountant) and state["stream"] != self._stream:
            raise PrivacyError(
                f"this engine has spent {len(self.accountant)} steps of a run that the saved one does not continue, "
                "which loading it would forget: load it into a new engine"
            )
        if self._ledger is None:
            if state["ledger"] is not None:
                raise ConfigurationError("the saved run keeps a ledger: make PrivacyEngine(ledger=...) with its path")
            return
        record = self._ledger.check(**_place(state))
        if state["ledger"] is None and (record.later or record.torn):
            raise PrivacyError(f"the saved run keeps no ledger, but '{self._ledger.path}' has steps of another run")
        if not record.spent <= _totals(saved):
            raise PrivacyError(
                f"the saved run claims less than its ledger '{self._ledger.path}' has recorded: "
                f"{len(saved)} steps against {sum(record.spent.values())}, or with more noise"
            )

    def load_state_dict(
        self, state: dict[str, Any], noise_multiplier: float, *, replay: bool, other_ranks: bool = False
    ) -> bool:
        """Go on from there. Returns whether the steps recorded since will be repeated; otherwise they are charged now,
        and nothing random may come from the saved streams any more.

        noise_multiplier: what a step stands for of which no more is known than that it may have happened. other_ranks:
            the group has another size than the saved run's, so that sums are rounded otherwise: recorded steps cannot
            be repeated to the bit.
        """
        self.accountant.load_state_dict(state["accountant"])
        record = Record()
        replay = replay and FRESH not in (self._stream, state["stream"])
        if self._ledger is not None:
            record = self._ledger.check(**_place(state))
            lost = bool(record.later or record.torn)
            if {entry.stream for entry in record.later} - {state["stream"]} or (other_ranks and lost):
                replay = False
            self._ledger.go_on(record, replay=replay)
        if replay:
            self._stream, self._counted = state["stream"], state["counted"] and tuple(state["counted"])
            return True
        self._counted = None  # what is left of an epoch counts anew: its records may have been in a lost step
        for entry in record.later:
            self.accountant.step(noise_multiplier=entry.noise_multiplier, sample_rate=entry.sample_rate)
        if record.torn:
            rate = self._plan.sample_rate if self._plan.poisson else 1.0
            self._record(noise_multiplier, rate, lambda: {"weights": "unknown", "sum": "unknown"})
            self.accountant.step(noise_multiplier=noise_multiplier, sample_rate=rate)
        return False


def _weights(release: Release, group: Group) -> Callable[[], str]:
    """What the ledger holds of the weights. All ranks together find it where weights are sharded, rank 0 otherwise."""
    if not any(is_sharded(weight) for weight in release.weights):
        return lambda: fingerprint(release.weights)
    found = fingerprint(release.weights, group)
    return lambda: found


def _seal(release: Release) -> str:
    """What the ledger holds of the sum."""
    return seal(release.total, None if release.noise is None else release.noise.state())


def _place(state: dict[str, Any]) -> dict[str, Any]:
    """Where in the ledger the saved run stands; a run without one stands at the beginning of an empty one."""
    return state["ledger"] or {"position": 0, "chain": BEGINNING}


def _totals(accountant: Accountant) -> Counter[tuple[float, float]]:
    totals: Counter[tuple[float, float]] = Counter()
    for noise, rate, steps in accountant.history:
        totals[noise, rate] += steps
    return totals
