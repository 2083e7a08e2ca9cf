"""Settings of a run as a file: TOML or YAML in, TOML out. A file holds RunConfig's fields, one a line."""

from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.files.foreign_files import SETTINGS, read_bytes
from lsg.files.foreign_text import in_toml
from lsg.files.foreign_values import toml_value, yaml_value


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a file names. Whether they are known and of the right type is RunConfig's to say."""
    try:
        path.stat()
        text = read_bytes(path, SETTINGS).decode("utf-8")
    except ConfigurationError as error:
        raise ConfigurationError(f"--config {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigurationError(f"--config {path}: cannot be read ({reason})") from None
    try:
        if path.suffix == ".toml":
            return toml_value(text)
        if path.suffix in (".yaml", ".yml"):
            return _settings(yaml_value(text, f"--config {path}: YAML"))
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}") from None
    raise ConfigurationError(f"--config {path}: must end in .toml, .yaml or .yml")


def to_toml(settings: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in settings.items())


def _settings(found: Any) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError("must hold 'name: value' lines")
    return {str(key): value for key, value in found.items() if value is not None}


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return in_toml(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)
