"""Settings of a run as a file: TOML or YAML in, TOML out. A file holds RunConfig's fields, one a line."""

import json
import tomllib
from pathlib import Path
from typing import Any

from lsg.errors import ConfigurationError
from lsg.extras import needs_extra


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a file names. Whether they are known and of the right type is RunConfig's to say."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigurationError(f"--config {path}: cannot be read ({reason})") from None
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{path}: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    raise ConfigurationError(f"--config {path}: must end in .toml, .yaml or .yml")


def to_toml(settings: dict[str, Any]) -> str:
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in settings.items())


def _yaml(path: Path, text: str) -> dict[str, Any]:
    with needs_extra("train", f"--config {path}: YAML"):
        import yaml

    class UniqueKeys(yaml.SafeLoader):
        """PyYAML takes the last of two equal keys without a word; this refuses them, at any depth."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue  # no key of a setting; PyYAML refuses those that cannot be one at all
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"'{key.value}' is given twice", key.start_mark)
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    loader = UniqueKeys(text)
    try:
        settings = loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path}: must hold 'name: value' lines")
    return {str(key): value for key, value in settings.items() if value is not None}


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        # JSON escapes as TOML does, but for the one control character that JSON lets pass.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
