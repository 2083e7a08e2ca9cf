"""The settings that a run's file holds in, a RunConfig out; two RunConfigs in, what differs out.

Defaults change from version to version. A stored run keeps its meaning all the same: what its file lacks is filled in
with what lsg did when it wrote such files, and not with today's defaults.
"""

from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from typing import Any

from lsg.train.config import RunConfig

# How a run is computed. None of these changes which records a step takes, its noise or a guarantee.
HOW_COMPUTED = ("max_physical_batch_size", "max_physical_tokens", "compile", "cuda_graphs")

# What lsg did in runs whose file lacks a setting: it was None, which files leave out, or did not exist yet.
# A new field of RunConfig gets a line here: what lsg did before it existed.
LACKED: dict[str, Any] = {
    "recipe": "paper",
    "data": None,
    "epsilon": None,
    "noise_multiplier": None,
    "pooling": "model",
    "head_lr": 1.0,
    "max_physical_tokens": None,
    "compile": None,
    "cuda_graphs": None,
    "text_column": None,
    "pair_column": None,
    "label_column": None,
    "warmup": 0.0,
    "averaging": 0.0,
    "unit_column": None,
    "max_records_per_unit": None,
    "views": 1,
    "tuning_part": None,
    "lora": None,
    "merge": None,
    "prompt_column": None,
    "sample_prompt": None,
}


def stored_config(values: dict[str, Any], source: str) -> RunConfig:
    """What `RunConfig.to_dict` wrote, in this version or an older one. source: the file, for errors."""
    return RunConfig.from_dict(values, source, lacked=LACKED)


def differences(begun: RunConfig, wanted: RunConfig, besides: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Name of a setting -> its two values, where they differ. besides: settings that are not compared."""
    before, now = asdict(begun), asdict(wanted)
    return {key: (before[key], now[key]) for key in sorted(now) if before[key] != now[key] and key not in besides}


def computed_as(begun: RunConfig, wanted: RunConfig, names: Iterable[str] = HOW_COMPUTED) -> RunConfig:
    """`wanted`, with these settings as the run was begun with."""
    return replace(wanted, **{name: getattr(begun, name) for name in names})
