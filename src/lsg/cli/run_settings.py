"""The settings of a run: options, a config file and what a run was begun with in, a whole configuration out."""

from pathlib import Path
from typing import Any

from lsg.cli.known_settings import known_settings
from lsg.distributed.group import Group
from lsg.train.choose import choose_settings
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.run import on_all
from lsg.train.stored_settings import stored_config


def run_settings(
    output: Path,
    config: Path | None,
    resume: bool,
    given: dict[str, Any],
    listener: Listener,
    group: Group | None = None,
) -> RunConfig:
    """Options before the file, the file before the recipe. A resumed run starts from what it was begun with. group: the
    processes that all get the same settings."""
    group = group or Group()
    known, begun, source = group.on_first(lambda: known_settings(output, config, resume, given))
    if begun:
        return stored_config(known, source)
    return on_all(group, known, lambda: choose_settings(known, source, listener))
