"""The privacy statement of a run: what a release of its model may claim, in numbers and in words."""

import math
from dataclasses import dataclass
from typing import Any

from lsg.accounting.rounding import epsilon_text
from lsg.train.config import RunConfig
from lsg.train.protected import Protected

ONE_RUN_ALONE = (
    "The guarantee covers this one run. If settings (learning rate, clipping, epochs, ...) were chosen by looking "
    "at other runs on the same data, each of those runs spent privacy too, and that is not counted here."
)
_CLIPPING = {
    "flat": "one L2 norm over all trained parameters",
    "per_layer": "one L2 norm a parameter, thresholds whose squares add up to the square of max_grad_norm",
    "automatic": "every sample scaled to the same L2 norm over all trained parameters",
}


@dataclass(frozen=True)
class Spent:
    """What a run did, as its engine counted it."""

    epsilon: float
    noise_multiplier: float
    sample_rate: float
    expected_batch_size: int
    steps: int
    protected: Protected
    noise_dimensions: int
    trained_parameters: int


@dataclass(frozen=True)
class DataFacts:
    """What a release tells of the data and the model. Never a path, and nothing computed from records.

    used: which part of the data was trained on; "" for all. classes: 0 of texts that a language model learns to write.
    image_size: (channels, height, width); None of texts. pairs: two texts a record, or a prompt and a text.
    """

    data: str
    model: str
    used: str
    classes: int
    image_size: tuple[int, int, int] | None = None
    pairs: bool = False


def privacy_statement(config: RunConfig, spent: Spent, facts: DataFacts, versions: dict[str, Any]) -> dict[str, Any]:
    """What goes into privacy.json. It is made to be published: no seed, no path, no name of a person or machine."""
    private = math.isfinite(spent.epsilon)
    return {
        "statement": _statement(config, spent, facts) if private else _no_statement(config),
        "epsilon": spent.epsilon if private else None,
        "delta": config.delta if private else None,
        "neighbouring_relation": _neighbours(spent.protected),
        "accountant": config.accountant,
        "noise_multiplier": spent.noise_multiplier,
        "sampling": _sampling(spent.protected),
        "sample_rate": spent.sample_rate,
        "expected_batch_size": spent.expected_batch_size,
        "steps": spent.steps,
        "records": spent.protected.records,
        "units": spent.protected.units,
        **({"views": config.views} if config.views > 1 else {}),
        "clipping": config.clipping if config.method != "non-private" else None,
        "clipping_meaning": _CLIPPING[config.clipping] if config.method != "non-private" else None,
        "max_grad_norm": config.max_grad_norm if config.method != "non-private" else None,
        "method": str(config.make_method()),
        "noise_dimensions": spent.noise_dimensions,
        "trained_parameters": spent.trained_parameters,
        **({"lora": config.lora} if config.lora is not None else {}),
        "task": config.task,
        "model": facts.model,
        "data": facts.data,
        "trained_part": facts.used or "all of the training data",
        "public_by_assumption": _public(config, spent, facts) if private else [],
        "caveats": _caveats(config, spent.protected) if private else [],
        "versions": versions,
    }


def _statement(config: RunConfig, spent: Spent, facts: DataFacts) -> str:
    epsilon = epsilon_text(spent.epsilon)
    times = f"{math.exp(float(epsilon)):.3g} times" if float(epsilon) < math.log(1000) else f"e^{epsilon} times"
    whom, noun = spent.protected, spent.protected.noun
    without = "without it" if whom.persons is None else "without them"
    return (
        f"This model was trained on {whom.counted} with ({epsilon}, {config.delta:g})-differential privacy. "
        f"{_meaning(whom, config)}: whatever somebody computes from the released weights, its probability with the "
        f"{noun} in the data is at most {times} its probability {without}, and the other way round, but for events of "
        f"total probability {config.delta:g}. It holds for every {noun}, whatever else that somebody knows. It was "
        f"achieved by {spent.steps:,} training steps, each on {_drawn(spent)}{_with_records(whom)}), by limiting each "
        f"{noun}'s contribution to a step{_views(config)} to an L2 norm of {config.max_grad_norm:g}, and by adding "
        f"Gaussian noise of {spent.noise_multiplier:.4g} times that limit to each of the "
        f"{spent.noise_dimensions:,} numbers that a step learns from the data. "
        f"The total was computed by the {config.accountant.upper()} accountant. "
        + (f"Trained on: {facts.used}. So one {noun} more or less moves no other. " if facts.used else "")
        + f"The number of {noun}s, and the rest of public_by_assumption, counts as known to everybody."
    )


def _drawn(spent: Spent) -> str:
    """Which records a step is on, up to a closing bracket."""
    noun = spent.protected.noun
    if spent.sample_rate == 1:
        return f"all {noun}s (none is left out by chance"
    return (
        f"a random sample of about {spent.expected_batch_size:,} {noun}s (every {noun} independently with probability "
        f"{spent.sample_rate:.4g}"
    )


def _neighbours(whom: Protected) -> str:
    return "add or remove one record" if whom.persons is None else "add or remove one person: all records of one id"


def _sampling(whom: Protected) -> str:
    drawn = f"Poisson: each {whom.noun} enters each step independently with probability sample_rate"
    return drawn if whom.persons is None else f"{drawn}{_with_records(whom)}; their gradients are averaged"


def _with_records(whom: Protected) -> str:
    if whom.persons is None:
        return ""
    return f", with all records of that id, or {whom.most} of them, chosen anew for each step, if there are more"


def _meaning(whom: Protected, config: RunConfig) -> str:
    """What is protected, up to "adding or removing it"."""
    if whom.persons is None:
        records = {
            "generate": "one whole text, with its prompt if it has one",
            "tokens": "one list of words with its tags",
        }
        what = records.get(config.kind or "", "one training example")
        return f"One record is {what}, and the guarantee is about adding it to the data or removing it"
    return (
        "One person is all records with one id, and the guarantee is about adding all of them to the data or removing "
        "them"
    )


def _views(config: RunConfig) -> str:
    return f", the average over {config.views} random views of it," if config.views > 1 else ""


def _no_statement(config: RunConfig) -> str:
    return (
        f"This model has no privacy guarantee: it was trained with --method {config.method} without noise. Treat its "
        "weights as you would treat the training data themselves."
    )


def _public(config: RunConfig, spent: Spent, facts: DataFacts) -> list[str]:
    """What was read off the data without noise, and is taken to be known to everybody."""
    whom = spent.protected
    chosen = ", and so does what --recipe auto chose to train, and how" if config.recipe == "auto" else ""
    public = [
        f"The number of training {whom.noun}s, {whom.units:,}: the rate of sampling, the number of steps and the noise "
        f"follow from it{chosen}.",
        "The weights that training began with: they must not have been made from these records.",
    ]
    if facts.classes:
        public.insert(
            1,
            f"The number of classes, {facts.classes:,}, and their names: they are the shape of the model's last layer "
            f"and stand in its files. A {whom.noun} with a label that no other has would change them.",
        )
    if whom.persons is not None:
        public.append(f"The number of records of these persons together, {whom.records:,}: it stands here.")
    if facts.image_size is not None:
        channels, height, width = facts.image_size
        public.append(
            f"The size of the images, {height} x {width} in {channels} channels: the model's shape may follow from it. "
            "Brightness is normalised by constants, not by the data."
        )
        return public
    form = "a tag for each word" if config.kind == "tokens" else "two texts" if facts.pairs else "one text"
    return [
        *public,
        f"The form of the records: their columns, and {form} in each.",
        "The lengths of the texts in tokens: they decide how records are grouped and padded while computing. Neither "
        "changes what is computed. The vocabulary comes with the model, not from the data.",
    ]


def _caveats(config: RunConfig, whom: Protected) -> list[str]:
    """What the numbers do not cover."""
    caveats = [
        ONE_RUN_ALONE,
        "All random numbers follow from one seed, so that the run can be repeated. Whoever knows or guesses it can "
        "compute the noise and take it off again. config.toml and result.json hold it: do not release them where the "
        "data are secret, and do not choose the seed by hand then (without --seed, lsg train draws a secret one). The "
        "generators are torch's own, which are not cryptographic.",
        "The training loss, the norms and the shares of clipped gradients in metrics.jsonl and tensorboard/ were "
        "computed from the training data without noise. They are not private and must not be released with the model.",
        "A folder checkpoint/, if one is left, holds the random streams and the optimizer's state: do not release it.",
        "A record is one row of the training data. A person who contributed several rows is protected less, in "
        "proportion to their number."
        if whom.persons is None
        else "A person is one id of the training data. Somebody whose rows stand under several ids is protected less, "
        "in proportion to their number. What the rows of others tell about somebody is not covered.",
    ]
    if config.kind == "generate":
        caveats.append(
            "What the model wrote while it was trained was computed from weights that the steps before had released, "
            "and from a public prompt: the guarantee covers it. A language model can still repeat what stands in the "
            f"texts of many {whom.noun}s: what a {whom.noun} shares with others is not theirs alone to protect."
        )
    if config.tuning_part:
        caveats.append(
            "THE EPSILON DOES NOT COVER THE SEARCH FOR THE SETTINGS. THEY WERE CHOSEN ON ABOUT "
            f"{100 * config.tuning_part:g} % OF THE DATA, WHICH THIS RUN DID NOT TRAIN ON: THE RECORDS IN THAT PART "
            "HAVE NO GUARANTEE. The guarantee is that of all other records."
        )
    if config.validation:
        caveats.append(
            f"The score was computed on about {100 * config.validation:g} % of the training data, which were held out, "
            "without noise. "
            "The guarantee does not cover those records."
        )
    else:
        caveats.append(
            "The scores were computed on the evaluation data without noise. The guarantee does not cover those records."
        )
    return caveats
