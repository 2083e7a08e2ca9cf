"""What can go wrong: every error that lsg raises on purpose is one of these, and names its culprit."""


class LsgError(Exception):
    """Base of all deliberate errors of lsg."""


class ConfigurationError(LsgError, ValueError):
    """An argument, a model or a loader cannot be used as given. Nothing has been trained or spent yet."""


class PrivacyError(LsgError, RuntimeError):
    """Going on would break the privacy guarantee, or make the reported epsilon wrong."""


class BudgetExceeded(PrivacyError):  # noqa: N818  (it ends a run as planned; nothing went wrong)
    """The next step would pass the target epsilon. It was not taken."""


class OutOfMemory(LsgError, RuntimeError):  # noqa: N818  (as torch and Python name theirs)
    """A single sample does not fit into memory."""
