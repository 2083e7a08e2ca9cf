"""Shared by the tests of readers: bad data is refused in one line that names the culprit."""

from pathlib import Path

import pytest

from lsg.errors import ConfigurationError
from lsg.tasks.catalog import load_task


def refusal(task: str, data: Path | str | None, **columns: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_task(task, None if data is None else str(data), **columns)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message
