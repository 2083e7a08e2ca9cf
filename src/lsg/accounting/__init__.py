"""ε and its books: what a noise costs, what a budget buys, and what has been spent."""

from lsg.accounting.accountant import Accountant, create_accountant
from lsg.accounting.calibration import calibrate_noise
from lsg.accounting.epsilon import epsilon_of

__all__ = ["Accountant", "calibrate_noise", "create_accountant", "epsilon_of"]
