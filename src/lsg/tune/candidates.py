"""Which settings are tried: a base configuration and values to vary in, all combinations as configurations out."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from lsg.errors import ConfigurationError
from lsg.train.config import RunConfig, field_type, option

# The question, the data and the promise; how it is computed; and the seed, which each run draws.
NOT_VARIED = (
    *("task", "data", "recipe", "unit_column", "max_records_per_unit", "text_column", "pair_column", "label_column"),
    *("prompt_column", "sample_prompt", "merge"),
    *("train_limit", "validation", "tuning_part"),
    *("epsilon", "noise_multiplier", "delta", "accountant", "seed"),
    *("device", "precision", "compile", "cuda_graphs", "max_physical_batch_size", "max_physical_tokens"),
)


def usual_variations(base: RunConfig) -> dict[str, list[Any]]:
    """What is tried when nothing is said: the rate up and down, the other kind of clipping, half the epochs."""
    return {
        "lr": [float(f"{base.lr * factor:.3g}") for factor in (1 / 3, 1, 3)],
        "clipping": [base.clipping, "flat" if base.clipping == "automatic" else "automatic"],
        "epochs": sorted({base.epochs, -(-base.epochs // 2)}),
    }


def read_variations(given: Sequence[str]) -> dict[str, list[Any]]:
    """Of `--try lr=0.1,0.2`, the setting and its values."""
    types = {field.name: field_type(field.type) for field in dataclasses.fields(RunConfig)}
    varied: dict[str, list[Any]] = {}
    for text in given:
        name, _, values = text.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if name not in types or name in NOT_VARIED:
            known = ", ".join(key for key in types if key not in NOT_VARIED)
            raise ConfigurationError(f"--try {text}: '{name}' cannot be varied; one of {known}")
        if name in varied:
            raise ConfigurationError(f"--try {text}: {option(name)} is given twice; put all its values into one --try")
        try:
            varied[name] = [types[name](value.strip()) for value in values.split(",") if value.strip()]
        except ValueError:
            raise ConfigurationError(f"--try {text}: {option(name)} takes {types[name].__name__} values") from None
        if not varied[name]:
            raise ConfigurationError(f"--try {text}: give values, as in --try lr=0.1,0.2")
    return varied


def candidates(base: RunConfig, varied: dict[str, list[Any]]) -> list[RunConfig]:
    """Every combination once, the base first where it is one of them. A bad value is refused here."""
    combined = itertools.product(*varied.values())
    found = [dataclasses.replace(base, **dict(zip(varied, values, strict=True))) for values in combined]
    different = list(dict.fromkeys(found))
    return sorted(different, key=lambda config: config != base)


def told(config: RunConfig, varied: dict[str, list[Any]]) -> str:
    """A candidate's varied settings in one line."""
    return ", ".join(f"{name} {getattr(config, name)}" for name in varied) or "the base settings"
