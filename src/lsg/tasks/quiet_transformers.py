"""Loading with transformers, without its reports, warnings and progress bars."""

import contextlib
import warnings
from collections.abc import Iterator
from logging import getLogger

from lsg.errors import ConfigurationError


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence load reports and progress bars: what is new in a model is returned instead."""
    try:
        from transformers.utils import logging
    except ImportError:
        raise ConfigurationError(
            "tasks of texts need the package transformers: pip install 'lsg-dp[transformers]'"
        ) from None

    hub = getLogger("huggingface_hub")  # warns of each try to reach a hub, before the one error
    verbosity, bars, hub_level = logging.get_verbosity(), logging.is_progress_bar_enabled(), hub.level
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        if bars:
            logging.enable_progress_bar()
