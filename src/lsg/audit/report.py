"""The settings of an audit in; the audits of each seed, with values for a JSON file, and their violations out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lsg.audit.batches import Batches, audit_batches
from lsg.audit.observations import WhiteBox
from lsg.audit.one_run import OneRun, audit_one_run
from lsg.audit.rig import UnitShape
from lsg.audit.settings import RANK, SAMPLED_EPOCHS, SPARSITY, AuditSettings
from lsg.audit.white_box import audit_run, audit_step
from lsg.methods import Method, make_method


@dataclass(frozen=True)
class Audit:
    """All audits of one seed."""

    seed: int
    white_box: list[WhiteBox]
    batches: Batches | None
    one_run: OneRun | None

    @property
    def violations(self) -> list[str]:
        parts: list[Any] = [*self.white_box, self.batches, self.one_run]
        return [message for part in parts if part is not None for message in part.violations]

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seed": self.seed, "violations": self.violations}
        found["white_box"] = [
            {
                "claimed_epsilon": part.claimed,
                "epsilon_at_least": part.bound,
                "noise_multiplier": part.noise_multiplier,
                "sample_rate": part.mechanism.sample_rate,
                "steps": part.mechanism.steps,
                "false_alarm_rate_of_a_test": part.alpha,
                "canaries": [
                    {
                        "canary": o.canary,
                        "sensitivity_over_C": o.sensitivity.largest,
                        "epsilon_at_least": o.bounds.mechanism,
                        "epsilon_at_least_any_mechanism": o.bounds.threshold,
                        "trials": o.bounds.trials,
                        "noise_p_value": o.noise_p_value,
                    }
                    for o in part.observed
                ],
            }
            for part in self.white_box
        ]
        if self.batches is not None:
            found["batches"] = {
                "sample_rate": self.batches.sample_rate,
                "steps": self.batches.steps,
                "accounted_steps": self.batches.accounted_steps,
                "false_alarm_rate_of_a_test": self.batches.alpha,
                "torn_units": self.batches.torn,
                "counts": [vars(c) | {"p_value": c.p_value} for c in self.batches.counts],
            }
        if self.one_run is not None:
            run = self.one_run
            found["one_run"] = {
                "claimed_epsilon": run.claimed,
                "epsilon_at_least": run.bound,
                "noise_multiplier": run.noise_multiplier,
                "canaries": run.canaries,
                "guesses": run.guesses,
                "correct": run.correct,
                "false_alarm_rate": run.alpha,
            }
        return found


def audited_method(name: str) -> Method:
    """The method of this name as it is audited."""
    return make_method(name, rank=RANK, sparsity=SPARSITY)


def audit(settings: AuditSettings, *, on_part: Callable[[str], None] = lambda part: None) -> list[Audit]:
    """One audit for each seed. `on_part` hears what is about to be audited."""
    return [_audit_seed(settings, seed, on_part) for seed in range(settings.seeds)]


def violations(audits: Sequence[Audit]) -> list[str]:
    return [f"seed {one.seed}: {message}" for one in audits for message in one.violations]


def _audit_seed(settings: AuditSettings, seed: int, on_part: Callable[[str], None]) -> Audit:
    method, clipping = audited_method(settings.method), settings.clipping
    unit = UnitShape(settings.records_per_unit, settings.views)
    common: dict[str, Any] = {"epsilon": settings.epsilon, "delta": settings.delta, "seed": seed, "unit": unit}
    wanted = [
        name
        for name, mode in (
            ("step", "white-box"),
            ("run", "white-box"),
            ("batches", "white-box"),
            ("one run", "one-run"),
        )
        if settings.mode in (mode, "all") and not (name == "run" and settings.steps == 1)
    ]
    alpha = (1 - settings.confidence) / (settings.seeds * len(wanted))
    white_box: list[WhiteBox] = []
    batches, one_run = None, None
    for name in wanted:
        on_part(f"seed {seed}: {name}")
        if name == "step":
            white_box.append(audit_step(method, clipping, **common, trials=settings.trials, alpha=alpha))
        elif name == "run":
            trials = max(50, settings.trials // settings.steps)
            white_box.append(audit_run(method, clipping, **common, steps=settings.steps, trials=trials, alpha=alpha))
        elif name == "batches":
            batches = audit_batches(epochs=SAMPLED_EPOCHS, seed=seed, alpha=alpha, unit=unit)
        else:
            one_run = audit_one_run(
                method, clipping, **common, canaries=settings.canaries, epochs=settings.epochs, alpha=alpha
            )
    return Audit(seed, white_box, batches, one_run)
