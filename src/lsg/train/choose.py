"""Settings that a user gave in, all settings of a run out: what was not given comes from a recipe.

--recipe auto reads the data first: how many records there are decides what can be learnt at this ε. --recipe paper
takes the paper's settings.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lsg.accounting.budget import safe_delta
from lsg.methods import METHODS
from lsg.recipes import Recipe, recommend
from lsg.tasks.names import KINDS, check_task
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.presets import preset

# Tokens computed at once. A CPU's caches hold few.
TOKENS = {"cpu": 2048, "cuda": 16384}
WRITTEN_TOKENS = {"cpu": 2048, "cuda": 8192}  # each has a number for every word of the vocabulary
IMAGES = 1024  # of features of images, computed at once: their networks are small
CPU_IMAGES = 128  # of whole images in a wide ResNet: more at once are slower (results/bench/cpu-micro-batches.json)
_ASSUMED_EPSILON = 3.0  # for the choice alone, where a noise multiplier is given in place of ε
# Fields that a recipe and a run's settings have alike.
_SAME = (
    *("model", "delta", "trainable", "pooling", "clipping", "max_grad_norm", "optimizer", "lr", "head_lr"),
    *("lr_schedule", "warmup", "momentum", "weight_decay", "batch_size", "epochs", "averaging", "views"),
)
_GREY = ("fashion-mnist", "digits")
_OWN_DATA = ("text", "tokens", "generate", "images")  # tasks without a δ that the literature has agreed on


def choose_settings(given: dict[str, Any], source: str, listener: Listener) -> RunConfig:
    """given: fields of RunConfig by name, all of them where a run goes on. source: of them, for errors.

    Tells the listener what was chosen, and why.
    """
    from lsg.train.precision import choose_device  # with PyTorch, for which `lsg budget` need not wait
    from lsg.train.prepare_data import prepare_data

    task, usual = str(given["task"]), _usual(given)
    config = settings_before_data(_machine(usual | given) | given, source)
    recipe = config.recipe
    if recipe == "paper" or config.method == "non-private":
        return config
    data = prepare_data(config, choose_device(config.device), _Quiet(listener))
    channels, protected = None if data.shape is None else data.shape.channels, data.protected(config)
    found = recipe_for(task, protected.units, config.epsilon, given.get("delta"), channels, config.lora is not None)
    chosen = replace(found, counted=f"{protected.noun}s")
    fields = recipe_fields(chosen)
    if fields["model"] is None:
        del fields["model"]
    if KINDS[task] == "image":
        usual |= {"max_physical_batch_size": IMAGES}
    machine = _machine({**usual, **fields, **given})
    settings = RunConfig.from_dict({**usual, **machine, **fields, **given, "recipe": recipe}, source)
    listener.note(told(_as_settled(chosen, settings), given))
    return settings


def settings_before_data(given: dict[str, Any], source: str) -> RunConfig:
    """The usual settings where nothing is given, and no recipe that depends on the data."""
    return RunConfig.from_dict({**_usual(given), "recipe": "auto", **given}, source)


def _usual(given: dict[str, Any]) -> dict[str, Any]:
    check_task(str(given["task"]))
    return preset(str(given["task"]), str(given.get("method", RunConfig.method)))


def recipe_for(
    task: str,
    records: int,
    epsilon: float | None,
    delta: float | None,
    channels: int | None = None,
    adapters: bool = False,
) -> Recipe:
    """The recommended recipe for a task with so many records, or persons. Without ε or δ: for usual ones.

    channels: of images, where their task does not tell. adapters: --lora was given.
    """
    epsilon = _ASSUMED_EPSILON if epsilon is None else epsilon
    delta = _usual_delta(task, records) if delta is None else delta
    channels = channels or (1 if task in _GREY else 3)
    return recommend(
        records=records, epsilon=epsilon, delta=delta, task=KINDS[task], channels=channels, adapters=adapters
    )


def _usual_delta(task: str, records: int) -> float:
    """The literature's of a public task, where so many records allow it."""
    agreed: float = preset(task, RunConfig.method)["delta"]
    return agreed if task not in _OWN_DATA and agreed < 1 / records else safe_delta(records)


def told(recipe: Recipe, given: Iterable[str]) -> str:
    """For people: the recipe, and which of its fields somebody has given."""
    kept = sorted(recipe_fields(recipe).keys() & set(given))
    return str(recipe) + (f"\n  given, and kept: {', '.join(kept)}" if kept else "")


def _as_settled(recipe: Recipe, settings: RunConfig) -> Recipe:
    """The recipe with what somebody has given in its place."""
    same = {name: getattr(settings, name) for name in _SAME if name != "model" or recipe.model}
    return replace(recipe, **same, method=settings.make_method())


def recipe_fields(recipe: Recipe) -> dict[str, Any]:
    """As fields of RunConfig."""
    names = {known.kind: name for name, known in METHODS.items()}
    method = {
        "method": names[type(recipe.method)],
        "rank": recipe.method.rank or RunConfig.rank,
        "sparsity": recipe.method.sparsity or RunConfig.sparsity,
        "head_scale": recipe.method.head_scale,
    }
    return method | {name: getattr(recipe, name) for name in _SAME}


def _machine(settings: dict[str, Any]) -> dict[str, Any]:
    """What suits the device, for every recipe; none of it changes a result by more than rounding."""
    from lsg.train.precision import choose_device

    device = choose_device(str(settings.get("device", RunConfig.device))).type
    if KINDS[settings["task"]] != "image":
        tokens = WRITTEN_TOKENS if KINDS[settings["task"]] == "generate" else TOKENS
        return {"max_physical_tokens": tokens.get(device, 8192)}
    # The rows of a person, or of an image's views, are computed together, however many they are.
    single = settings.get("unit_column") is None and settings.get("views", 1) == 1
    return {"max_physical_batch_size": CPU_IMAGES} if device == "cpu" and single and _is_wide(settings) else {}


def _is_wide(settings: dict[str, Any]) -> bool:
    return str(settings["model"]).startswith("wrn")


class _Quiet(Listener):
    """Shows progress of preparing data, and leaves their description to the run itself."""

    def __init__(self, shown: Listener) -> None:
        self._shown = shown

    def prepared(self, what: str, done: int, total: int) -> None:
        self._shown.prepared(what, done, total)
