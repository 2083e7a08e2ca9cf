"""Phases and δ in, ε out, by privacy random variables: the tightest of the three accountants, and the paper's."""

import math

from lsg.accounting.libraries import quiet
from lsg.accounting.phases import Phase
from lsg.accounting.rdp import rdp_epsilon

# Points of the grid, about a second of work. A run that would need more pays with a somewhat larger ε instead of more
# time.
_LARGEST_GRID = 2**21


def prv_epsilon(phases: tuple[Phase, ...], delta: float, round_off: float, loose: float) -> float:
    """ε by Gopi et al. 2021 with Opacus's privacy random variables: their estimate plus its error bounds.

    Opacus's own accountant is put together anew here for three reasons: its grid has no largest size, its allowed error
    is the same 0.01 for ε = 0.05 and ε = 500, and it integrates the mean of a step with an error near 4e-10, of which
    a million steps keep 4e-4. The variable bounds δ for a removed record; for the Poisson-sampled Gaussian that is the
    worse direction (PLD, which computes both, agreed at each of 328 settings compared).
    """
    with quiet():
        import numpy as np
        from opacus.accountants.analysis.prv import (
            DiscretePRV,
            Domain,
            PoissonSubsampledGaussianPRV,
            compose_heterogeneous,
        )
        from scipy.fft import next_fast_len

        counts = [phase.steps for phase in phases]
        total, delta_error = sum(counts), delta / 1000
        # Remark 5.6 of Gopi et al.: losses beyond ±reach have too little mass to matter, composed or alone.
        alone = max(rdp_epsilon((phase._replace(steps=1),), delta_error / (8 * total)) for phase in phases)
        reach = max(rdp_epsilon(phases, delta_error / 4), alone) + 3
        # 1 % of a small ε, 0.01 from 1 to 10, 0.1 % of a large one; more where the grid would grow too large.
        wanted = max(0.01 * min(loose, 1.0), 0.001 * loose)
        spread = math.sqrt(total * math.log(12 / delta_error) / 2)
        mesh = max(wanted / spread, 2 * reach / _LARGEST_GRID)
        eps_error = mesh * spread

        half = next_fast_len(math.ceil(reach / mesh) + 1)
        domain = Domain(t_min=-(half - 1) * mesh, t_max=half * mesh, size=2 * half)
        edges = np.linspace(domain.t_min - mesh / 2, domain.t_max + mesh / 2, domain.size + 1)
        steps = []
        for noise, rate, _ in phases:
            mass = np.diff(PoissonSubsampledGaussianPRV(rate, noise).cdf(edges))
            mass /= mass.sum()
            shift = _mean_loss(noise, rate) - float(np.dot(domain.ts, mass))
            if not abs(shift) < mesh / 2:
                raise ArithmeticError("the grid's mean strays from the true mean by half a cell or more")
            steps.append(DiscretePRV(pmf=mass, domain=domain.shift_right(shift)))
        composed = compose_heterogeneous(dprvs=steps, num_self_compositions=counts)
        if not abs(float(composed.pmf.sum()) - 1) < 1e-6:
            raise ArithmeticError("the composed masses do not add up to 1")
        _, _, upper = composed.compute_epsilon(delta, delta_error + round_off, eps_error)
        return max(float(upper), 0.0) if math.isfinite(upper) else math.inf


def _mean_loss(noise: float, rate: float) -> float:
    """Mean privacy loss of one step, KL(P‖N(0,σ²)) with P = (1−q)·N(0,σ²) + q·N(1,σ²), to rounding error."""
    import numpy as np

    if rate == 1:
        return 1 / (2 * noise**2)
    # The trapezoid rule on a Gaussian integrand converges faster than any power of the spacing.
    x = np.linspace(-12 * noise, 1 + 12 * noise, 20001)
    exponent = (2 * x - 1) / (2 * noise**2)
    near = np.log1p(rate * np.expm1(np.clip(exponent, -50, 50)))  # exact where the loss is as small as the rate
    loss = np.where(np.abs(exponent) < 50, near, np.logaddexp(math.log1p(-rate), math.log(rate) + exponent))
    weight = (1 - rate) * np.exp(-(x**2) / (2 * noise**2)) + rate * np.exp(-((x - 1) ** 2) / (2 * noise**2))
    return float(np.dot(weight, loss) / weight.sum())
