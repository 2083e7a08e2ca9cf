"""What can go wrong: every error that lsg raises on purpose is one of these, and names its culprit."""

_NO_MEMORY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class LsgError(Exception):
    """Base of all deliberate errors of lsg."""


class ConfigurationError(LsgError, ValueError):
    """An argument, a model or a loader cannot be used as given. Nothing has been trained or spent yet."""


class AnotherRun(ConfigurationError):  # noqa: N818  (it is what a saved state is of)
    """A saved run began with other settings than those that are to continue it."""


class PrivacyError(LsgError, RuntimeError):
    """Going on would break the privacy guarantee, or make the reported epsilon wrong."""


class BudgetExceeded(PrivacyError):  # noqa: N818  (it ends a run as planned; nothing went wrong)
    """The next step would pass the target epsilon. It was not taken."""


class ProcessLost(LsgError, RuntimeError):  # noqa: N818  (it ends this process because of another one)
    """Another process of a run on several has ended. Nothing of the step under way was released here."""


class ReplicaError(PrivacyError):
    """The processes of a run no longer train the same model, or part of a batch was lost between them."""


class OutOfMemory(LsgError, RuntimeError):  # noqa: N818  (as torch and Python name theirs)
    """A single sample does not fit into memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU, of the processor, or of the libraries that report it in words of their own."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _NO_MEMORY)


def first_line(error: BaseException) -> str:
    """What an error says, without the rest of its message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
