"""The privacy loss's arithmetic is Opacus's, to the bit."""

import numpy as np
import pytest

from lsg.accounting.prv_loss import Domain, loss_distribution, upper_epsilon


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("noise", [0.3, 1.0, 7.0])
@pytest.mark.filterwarnings("ignore")  # Opacus
def test_the_distribution_of_a_step_is_opacus_s(rate: float, noise: float) -> None:
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV

    losses = np.linspace(-9, 30, 4001)
    with np.errstate(all="ignore"):
        theirs = PoissonSubsampledGaussianPRV(rate, noise).cdf(losses)
        ours = loss_distribution(losses, rate, noise)
    assert np.array_equal(ours, theirs)


@pytest.mark.filterwarnings("ignore")  # Opacus
def test_epsilon_of_masses_is_opacus_s() -> None:
    from opacus.accountants.analysis.prv import DiscretePRV
    from opacus.accountants.analysis.prv import Domain as TheirDomain

    ours = Domain(-3.0, 3.5, 2000).shift_right(0.01)
    theirs = TheirDomain(-3.0, 3.5, 2000).shift_right(0.01)
    assert np.array_equal(ours.ts, theirs.ts) and ours.shifts == theirs.shifts
    masses = np.diff(loss_distribution(np.append(ours.ts, 4.0), 0.1, 1.1))
    _, _, upper = DiscretePRV(pmf=masses, domain=theirs).compute_epsilon(1e-3, 1e-5, 0.02)
    assert upper_epsilon(masses, ours, 1e-3, 1e-5, 0.02) == upper
    with pytest.raises(ValueError, match="rounding errors"):
        upper_epsilon(masses, ours, 1e-17, 0.0, 0.02)
