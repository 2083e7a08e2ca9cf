"""A command line and its files in, what they say of a run's settings out, before PyTorch is loaded."""

import secrets
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.tasks.names import KINDS
from lsg.train.choose import settings_before_data
from lsg.train.config import option
from lsg.train.config_file import read_settings
from lsg.train.stored_settings import stored_config


def check_usage(output: Path, config: Path | None, resume: bool, given: dict[str, Any]) -> None:
    """Refuses what no run can have, whatever its data are."""
    known, begun, source = known_settings(output, config, resume, given)
    (stored_config if begun else settings_before_data)(known, source)


def known_settings(
    output: Path, config: Path | None, resume: bool, given: dict[str, Any]
) -> tuple[dict[str, Any], bool, str]:
    """(what is known of the settings; whether these are all, as the run was begun before; where they come from)"""
    begun = output / "config.toml"
    layers = [read_settings(path) for path in ((begun,) if resume and begun.is_file() else ())]
    layers += [] if config is None else [read_settings(config)]
    known: dict[str, Any] = {}
    for layer in (*layers, given):
        if {"epsilon", "noise_multiplier"} & layer.keys() or layer.get("method") == "non-private":
            known = {key: value for key, value in known.items() if key not in ("epsilon", "noise_multiplier")}
        known |= layer
    source = str(config or begun) if layers else "options"
    if resume and not begun.is_file() and not known:
        raise ConfigurationError(f"--resume: {output} holds no run to go on with")
    if "task" not in known:
        raise ConfigurationError(f"{option('task')} is missing: one of {', '.join(KINDS)}")
    known = {"seed": secrets.randbits(63), **known}  # secret, as secret data need; config.toml keeps it for --resume
    return known, resume and begun.is_file(), source
