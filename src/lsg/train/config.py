"""What one training run is: a frozen, validated description that can be written to a file and read back."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from lsg.accounting.epsilon import ACCOUNTANTS
from lsg.errors import ConfigurationError
from lsg.files.foreign_text import is_text
from lsg.methods import METHODS, Clipping, Importance, Method, make_method
from lsg.tasks.names import KINDS, POOLINGS, Kind

RECIPES = ("auto", "paper")
PRECISIONS = ("auto", "fp32", "tf32", "bf16")
OPTIMIZERS = ("adam", "sgd")
LR_SCHEDULES = ("constant", "linear", "steps")
TRAINABLE = ("paper", "all", "bias", "head")
POOLING = ("model", *POOLINGS)
MOST_EPOCHS = 1_000_000  # a row of metrics each; anything longer is a slip of the finger
# Beyond these, products and quotients with other settings leave the range of 32 bits, or no accountant can tell ε.
RANGES = {
    "max_grad_norm": (1e-30, 1e30),
    "head_scale": (1e-30, 1e30),
    "head_lr": (1e-30, 1e30),
    "noise_multiplier": (1e-6, 1e9),
    "epsilon": (1e-6, 1e6),
}


@dataclass(frozen=True)
class RunConfig:
    """One run: task x model x method and every number it depends on. A field's name is its option's, with dashes.

    data: a local path or a hub name; None takes the task's own source. model: a hub id, a local folder or a zoo name.
    recipe: where the settings came from that nobody gave (lsg.train.choose).
    epsilon, noise_multiplier: exactly one of them, neither for non-private.
    lr_schedule: "linear" decays to 0; "steps" divides by 5 at 30, 60 and 80 % of the steps (RGP's CIFAR-10 code).
    warmup: in that share of the steps the rate rises to lr, from almost 0; the schedule runs over the others.
    averaging: the model that is scored and saved has the weights' average over about that share of the steps so far,
        newer ones weighing more; 0 has the last weights. Averages cost no privacy.
    trainable: "paper" trains projectable weights and the head alone, with embeddings, biases and norms frozen, as RGP
        does; "all" trains everything, "bias" biases, norms and the head, "head" the head alone.
    head_lr: factor on the head's learning rate. A new head has a longer way to go than pretrained weights.
    pooling: of texts, what the head sees. "model" is the head that transformers adds to the model; "mean" and "first"
        are one linear layer on the mean, or the first, of the tokens' vectors (lsg.tasks.pooled).
    head_scale: factor on the head's per-sample gradients before clipping (RGP: 0.1 for text).
    train_limit: use about that share of the training records, the same ones for every seed. 0 uses all.
    validation: hold out about that share of the training records and score on them, not on the task's evaluation data:
        for tuning. 0 scores on the evaluation data. Both are shares, not numbers: see lsg.tasks.split.
    views: of each image in a step, randomly moved (and flipped, if natural), their gradients averaged before the clip.
        1 takes images as they are. `max_physical_batch_size` counts views.
    lora: of --task generate, the rank of adapters that are trained in place of the model's own weights; None trains
        these. merge: save the model with its adapters added to its weights, not the adapters alone.
    prompt_column: of --task generate, what stands before a text and is not learnt. sample_prompt: what the model
        continues after some epochs, for people to see; a public text, "" for none, None for lsg.train.samples's.
    tuning_part: a share of the training records, on which `lsg tune --held-out` chose these settings: never trained on.
    max_physical_tokens: of texts, a micro-batch has at most so many tokens: records times the longest of them. None
        sets no limit.
    max_physical_batch_size, max_physical_tokens, precision, device, compile, cuda_graphs: how it is computed; none
        changes a guarantee. precision "auto" is bf16 on a GPU and fp32 on a CPU; None for the last two leaves the
        choice to lsg.PerfConfig.
    unit_column: of the ids of persons, where all records of a person are to be protected together: batch_size, epsilon
        and delta are then about persons. max_records_per_unit: the most records of a person in a step, chosen anew for
        each; None takes lsg.train.protected's.
    """

    task: str
    model: str
    recipe: str = "paper"
    method: str = "lsg"
    data: str | None = None
    rank: int = 8
    sparsity: float = 0.5
    importance: Importance = "weight"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: str = "prv"
    clipping: str = "flat"
    max_grad_norm: float = 1.0
    optimizer: str = "adam"
    lr: float = 1e-3
    lr_schedule: str = "linear"
    momentum: float = 0.9
    weight_decay: float = 0.0
    adam_eps: float = 1e-6
    batch_size: int = 2000
    epochs: int = 20
    trainable: str = "paper"
    pooling: str = "model"
    head_scale: float = 1.0
    head_lr: float = 1.0
    max_length: int = 128
    train_limit: float = 0.0
    validation: float = 0.0
    seed: int = 0
    max_physical_batch_size: int = 256
    max_physical_tokens: int | None = None
    precision: str = "auto"
    device: str = "auto"
    compile: bool | None = None
    cuda_graphs: bool | None = None
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    warmup: float = 0.0
    averaging: float = 0.0
    unit_column: str | None = None
    max_records_per_unit: int | None = None
    views: int = 1
    tuning_part: float | None = None
    lora: int | None = None
    merge: bool | None = None
    prompt_column: str | None = None
    sample_prompt: str | None = None

    @property
    def kind(self) -> Kind | None:
        """Of the task; None of one that is not known."""
        return KINDS.get(self.task)

    def __post_init__(self) -> None:
        for name, known in (
            ("recipe", RECIPES),
            ("method", tuple(METHODS)),
            ("precision", PRECISIONS),
            ("optimizer", OPTIMIZERS),
            ("lr_schedule", LR_SCHEDULES),
            ("trainable", TRAINABLE),
            ("pooling", POOLING),
            ("accountant", ACCOUNTANTS),
            ("clipping", get_args(Clipping)),
        ):
            if getattr(self, name) not in known:
                raise ConfigurationError(f"{option(name)} '{getattr(self, name)}' must be one of {', '.join(known)}")
        self._check_sizes()
        for name in ("lr", "max_grad_norm", "head_scale", "head_lr", "adam_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{option(name)} {getattr(self, name)} must be positive and finite")
        limits = (
            "max_length",
            "max_physical_batch_size",
            "max_physical_tokens",
            "max_records_per_unit",
            "views",
            "lora",
        )
        for name in ("batch_size", "epochs", *limits):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigurationError(f"{option(name)} {getattr(self, name)} must be at least 1")
        for name in ("train_limit", "validation", "tuning_part"):
            if not 0 <= (getattr(self, name) or 0) < 1:
                raise ConfigurationError(
                    f"{option(name)} {getattr(self, name):g} must be a share, 0 or more and less than 1: which records "
                    "make up an exact number would depend on all of them"
                )
        for name in ("weight_decay", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{option(name)} {getattr(self, name)} must be 0 or more, and finite")
        if not 0 <= self.warmup < 1:
            raise ConfigurationError(
                f"--warmup {self.warmup:g} must be a share of the steps, 0 or more and less than 1"
            )
        if not 0 <= self.averaging <= 1:
            raise ConfigurationError(f"--averaging {self.averaging:g} must be a share of the steps, from 0 to 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigurationError(f"--seed {self.seed} must be 0 or more, and less than 2^63")
        if not 0 < self.delta < 1:
            raise ConfigurationError(f"--delta {self.delta} must lie between 0 and 1")
        if self.max_records_per_unit is not None and self.unit_column is None:
            raise ConfigurationError(
                f"--max-records-per-unit {self.max_records_per_unit} needs --unit-column, which says whose a record is"
            )
        self._check_budget()
        self.make_method()  # refuses a bad rank, sparsity or importance

    def _check_sizes(self) -> None:
        """Of every field: texts that a file can hold, and numbers that arithmetic with 32 bits can."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) and not is_text(value):
                raise ConfigurationError(f"{option(field.name)} '{value}' is not UTF-8 text, which files hold")
            if isinstance(value, int) and abs(value) >= 2**63:
                raise ConfigurationError(f"{option(field.name)} is a number of more than 18 digits")
        if self.epochs > MOST_EPOCHS:
            raise ConfigurationError(f"--epochs {self.epochs:,} must be at most {MOST_EPOCHS:,}")
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value and value > 0 and math.isfinite(value) and not least <= value <= most:
                raise ConfigurationError(f"{option(name)} {value:g} must be between {least:g} and {most:g}")

    def _check_budget(self) -> None:
        given = [name for name in ("epsilon", "noise_multiplier") if getattr(self, name) is not None]
        if self.method == "non-private":
            if given:
                raise ConfigurationError(f"{option(given[0])}: --method non-private has no privacy budget")
        elif len(given) != 1:
            raise ConfigurationError(
                f"--method {self.method} needs --epsilon or --noise-multiplier, and not both: {len(given)} were given"
            )
        if self.epsilon is not None and not 0 < self.epsilon < math.inf:
            raise ConfigurationError(f"--epsilon {self.epsilon} must be positive and finite")
        if self.noise_multiplier is not None and not 0 <= self.noise_multiplier < math.inf:
            raise ConfigurationError(f"--noise-multiplier {self.noise_multiplier} must be 0 or more, and finite")

    def make_method(self) -> Method:
        """The method as the engine takes it."""
        return make_method(
            self.method,
            rank=self.rank,
            sparsity=self.sparsity,
            importance=self.importance,
            head_scale=self.head_scale,
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field that is set, ready for JSON or TOML (which has no null)."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str, lacked: Mapping[str, Any] | None = None) -> "RunConfig":
        """The inverse of `to_dict`. `source` names the file in errors.

        lacked: taken in place of a field's default where `values` has none.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigurationError(f"{source}: unknown setting '{key}'")
        for key in ("task", "model"):
            if key not in values:
                raise ConfigurationError(f"{source}: '{key}' is missing")
        given = {key: _converted(known[key], value, source) for key, value in values.items()}
        return cls(**{**(lacked or {}), **given})


def field_type(annotation: Any) -> type:
    """str, int, float or bool: what a field holds where it is set, behind `float | None` or a Literal of strings."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    return kinds[0] if isinstance(kinds[0], type) else str


def _converted(field: dataclasses.Field[Any], value: Any, source: str) -> Any:
    """A value from a file in its field's type. YAML reads 1e-3 as text, and both formats read 3 as a whole number."""
    kind = field_type(field.type)
    if kind is float and not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    elif type(value) is kind:
        return value
    wanted = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}[kind]
    raise ConfigurationError(f"{source}: {field.name} = {value!r} must be {wanted}")


def option(name: str) -> str:
    return "--" + name.replace("_", "-")
