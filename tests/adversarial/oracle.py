"""The judge: drives lsg as a user does and compares everything it does with the plain model.

`judge(trial)` gives an Outcome. Right means, for every batch driven:
  1. the outputs are those of the model without rules;
  2. each record's gradient (projected, where the method projects) is that of ordinary autograd on the record alone;
  3. the clipped sum is the sum of those gradients, each clipped to the bound, broken records counted as zero;
  4. buffers do not depend on the records;
  5. all that holds with one record broken, too;
  6. adding a record, whole or broken, moves the clipped sum by at most the bound (so replacing one, by twice that).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lsg import PrivacyEngine
from lsg.errors import LsgError
from tests.adversarial.outcome import Outcome, short_reason
from tests.adversarial.plain import (
    PlainFailureError,
    keeps_records_apart,
    perturb,
    record_gradients,
    same_weights,
    statistics_kept,
)
from tests.adversarial.plain import tensors as output_tensors
from tests.adversarial.records import Batch
from tests.adversarial.trial import Trial
from tests.support.oracle import in_trained_space
from tests.support.reference import attach

_SLACK = 1e-3  # of the measured influence over the bound


# Warnings that trials meet anyway: their batches are not the loader's, and their own parts may warn.
_EXPECTED = re.compile(r"did not hand out|non-full backward hook|Secure RNG|requires a gradient but is not in the opt")


class WrongError(Exception):
    """lsg did something else than the plain model, and said nothing."""


def judge(trial: Trial) -> Outcome:
    """What comes of training this model with lsg."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            clean = keeps_records_apart(trial)
        except PlainFailureError as error:
            return Outcome("invalid", detail=str(error)[:300])
    return judge_loop(lambda: drive(trial), clean=clean)


def judge_loop(run: Callable[[], None], *, clean: bool = True) -> Outcome:
    """The outcome of a training loop that raises WrongError where lsg is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = _outcome(run)
    warned = any(issubclass(w.category, UserWarning) and not _EXPECTED.search(str(w.message)) for w in caught)
    return replace(outcome, clean=clean, warned=warned)


def _outcome(run: Callable[[], None]) -> Outcome:
    try:
        run()
    except LsgError as error:
        return Outcome("refused", short_reason(str(error)), str(error)[:300])
    except WrongError as error:
        return Outcome("silent", str(error).partition(":")[0], str(error)[:300])
    except Exception as error:
        return Outcome("crash", type(error).__name__, f"{type(error).__name__}: {error}"[:300])
    return Outcome("right")


def drive(trial: Trial) -> None:
    """Train on all batches, compare after each, then measure influence. Raises WrongError, or what lsg raises."""
    model = trial.build()
    engine, optimizer, _ = attach(
        model, trial.method, max_grad_norm=trial.bound, loss_reduction=trial.reduction, lr=0.1
    )
    meter = Meter(engine)
    noise = torch.Generator().manual_seed(trial.seed + 1)
    for batch, mode in zip(trial.batches, trial.all_modes, strict=True):
        plain = same_weights(model, trial)
        _one_step(trial, engine, optimizer, meter, model.train(mode), plain, batch, mode)
        perturb(model, noise, 0.1)  # as the noise that this run leaves out
    kept = statistics_kept(trial, model)
    if kept is not None:
        raise WrongError(f"buffer: '{kept}' holds statistics of the records")
    batch, mode = max(zip(trial.batches, trial.all_modes, strict=True), key=lambda pair: pair[0].size)
    if batch.size < 2:
        return
    i = trial.seed % batch.size
    if batch.breakable:  # a record that breaks must change nothing for the others
        plain = same_weights(model, trial)
        _one_step(trial, engine, optimizer, meter, model.train(mode), plain, batch.broken(i), mode)
    _measure_influence(trial, optimizer, meter, model.train(mode), batch, i)


def _one_step(
    trial: Trial,
    engine: PrivacyEngine,
    optimizer: Any,
    meter: Meter,
    model: nn.Module,
    plain: nn.Module,
    batch: Batch,
    mode: bool,
) -> None:
    output = trial.call(model, batch.clone())
    trial.loss(output, batch.clone(), trial.reduction).backward()
    wanted = in_trained_space(engine, _references(plain, trial, batch, mode))
    refused: LsgError | None = None
    found: dict[str, tuple[Tensor, ...]] = {}
    try:
        per_sample = engine.per_sample_gradients()
        found = {name: value if isinstance(value, tuple) else (value,) for name, value in per_sample.items()}
    except LsgError as error:  # inspecting is no part of a training loop: only a refused step is a refusal
        refused = error
    total = meter.sum_of_step(optimizer.step)
    optimizer.zero_grad()
    if refused is not None:
        if any(float(part.norm()) > 0 for parts in wanted.values() for part in parts):
            raise WrongError(f"gradients lost: a step was taken, but {refused}")
        return
    with torch.no_grad():
        plainly = output_tensors(trial.call(same_weights(plain, trial).train(mode), batch.clone()))
    if not trial.own_loss:
        _compare_outputs([t.detach() for t in output_tensors(output)], plainly, trial.tolerance)
    norms = _compare_gradients(found, wanted, trial.tolerance)
    _compare_sum(total, wanted, norms, trial)


def _references(plain: nn.Module, trial: Trial, batch: Batch, mode: bool) -> dict[str, Tensor]:
    try:
        return record_gradients(plain, trial, batch, mode)
    except Exception as error:
        raise WrongError(f"no reference: a record alone cannot be computed, but lsg said nothing ({error})") from error


def _compare_outputs(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape:
            raise WrongError(f"another output: shape {tuple(one.shape)} instead of {tuple(other.shape)}")
        error = (one - other).nan_to_num(0.0, 0.0, 0.0).norm() / other.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-6)
        if float(error) > tolerance or not torch.equal(one.isnan(), other.isnan()):
            raise WrongError(f"another output: relative error {float(error):.1e}")


def _compare_gradients(
    found: dict[str, tuple[Tensor, ...]], wanted: dict[str, tuple[Tensor, ...]], tolerance: float
) -> Tensor:
    """Returns each record's joint norm; not finite for a broken record, whose gradient is not compared."""
    squares = [part.double().reshape(len(part), -1).square().sum(1) for parts in wanted.values() for part in parts]
    norms = torch.stack(squares).sum(0).sqrt()
    whole = norms.isfinite()
    for name, parts in wanted.items():
        for one, other in zip(found[name], parts, strict=True):
            if one.shape != other.shape:
                raise WrongError(f"gradient: '{name}' has shape {tuple(one.shape)}, not {tuple(other.shape)}")
            error = (one.double() - other.double()).reshape(len(one), -1).norm(dim=1)[whole]
            worst = error / norms[whole].clamp_min(1e-3 * float(norms[whole].max()) if bool(whole.any()) else 1.0)
            if bool((~(worst <= tolerance)).any()):
                raise WrongError(f"gradient: of '{name}', relative errors {[f'{float(e):.1e}' for e in worst]}")
    return norms


def _compare_sum(total: Tensor, wanted: dict[str, tuple[Tensor, ...]], norms: Tensor, trial: Trial) -> None:
    """Entry by entry, but for their order, which is the engine's own; masked entries, which it leaves out, are zero."""
    factors = torch.where(norms.isfinite(), (trial.bound / norms).clamp(max=1.0), 0.0)
    expected = torch.cat([_clipped(part, factors) for parts in wanted.values() for part in parts]).double()
    got = torch.cat([total.double(), expected.new_zeros(max(0, len(expected) - len(total)))])
    if len(got) != len(expected):
        raise WrongError(f"clipped sum: {len(total)} numbers, not {len(expected)}")
    error = float((got.sort().values - expected.sort().values).norm())
    if not error <= 10 * trial.tolerance * max(float(expected.norm()), trial.bound):
        raise WrongError(f"clipped sum: norm {float(got.norm()):.6g}, expected {float(expected.norm()):.6g}")


def _clipped(part: Tensor, factors: Tensor) -> Tensor:
    rows = part.reshape(len(part), -1)
    return factors.to(rows.dtype) @ rows.masked_fill((factors == 0).unsqueeze(1), 0.0)


class Meter:
    """Reads the clipped sum of a step; can also keep the step from being released, so that weights stay."""

    def __init__(self, engine: PrivacyEngine) -> None:
        optimizer = engine.run.optimizer
        assert optimizer is not None
        self._gradients: Any = optimizer.gradients
        self._release = optimizer._release
        self.hold, self._sum = False, None
        optimizer._release = self._measure  # type: ignore[method-assign]

    def _measure(self) -> None:
        found = self._gradients.sum
        self._sum = None if found is None else found.vector.clone()
        if self.hold:
            self._gradients.forget_sum()
        else:
            self._release()

    def sum_of_step(self, step: Callable[[], None]) -> Tensor:
        self._sum = None
        step()
        return torch.zeros(0) if self._sum is None else self._sum


def _measure_influence(trial: Trial, optimizer: Any, meter: Meter, model: nn.Module, batch: Batch, i: int) -> None:
    """What record i, whatever it is, adds to the clipped sum, at the present weights, in the user's own loop."""
    meter.hold = True

    def total(records: Batch) -> Tensor:
        trial.loss(trial.call(model, records.clone()), records.clone(), trial.reduction).backward()
        vector = meter.sum_of_step(optimizer.step)
        optimizer.zero_grad()
        return vector.double()

    others = total(batch.without(i))
    with_it = {"this record": batch, "a copy of another": batch.with_copy(i, (i + 1) % batch.size)}
    if batch.breakable:
        with_it["a broken record"] = batch.broken(i)
    for which, records in with_it.items():
        influence = float((total(records) - others).norm())
        if not influence <= trial.bound * (1 + _SLACK):
            raise WrongError(f"influence: adding {which} moves the sum by {influence / trial.bound:.4g} C")
