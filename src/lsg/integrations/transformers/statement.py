"""What was trained and spent in; privacy.json and the model card's section out. Both are made to be published."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsg.accounting.rounding import epsilon_text
from lsg.engine import PrivacyEngine
from lsg.files.foreign_text import to_json
from lsg.integrations.transformers.arguments import PrivacyArguments
from lsg.sampling.plan import SamplingPlan
from lsg.train.privacy_statement import ONE_RUN_ALONE
from lsg.train.provenance import provenance

FILE = "privacy.json"
_START, _END = "<!-- privacy statement of lsg: begin -->", "<!-- privacy statement of lsg: end -->"
_CAVEATS = (
    ONE_RUN_ALONE,
    "The weights that training began with must not have been made from these records; their number counts as known to "
    "everybody.",
    "Training loss, norms and scores on private data were computed without noise: they are not private. The logs and "
    "checkpoint folders of the run hold them, and checkpoints hold the random streams that can undo the noise: do not "
    "release those.",
)


@dataclass(frozen=True)
class Facts:
    """What a statement is about. max_grad_norm: the threshold in force. records: rows of the data; the plan counts
    units."""

    privacy: PrivacyArguments
    plan: SamplingPlan
    engine: PrivacyEngine
    delta: float
    records: int
    noise_multiplier: float
    max_grad_norm: Any

    @property
    def noun(self) -> str:
        return "record" if self.privacy.unit_of is None else "unit"


def statement(facts: Facts) -> dict[str, Any]:
    """The content of privacy.json, at this moment of the run."""
    steps = len(facts.engine.accountant)
    epsilon = facts.engine.get_epsilon(facts.delta)
    private = math.isfinite(epsilon)
    whom = "one record" if facts.privacy.unit_of is None else "one unit: all records of one id"
    return {
        "statement": _words(facts, epsilon, steps),
        "epsilon": epsilon if private else None,
        "delta": facts.delta if private else None,
        "neighbouring_relation": f"add or remove {whom}",
        "accountant": facts.privacy.accountant,
        "noise_multiplier": facts.noise_multiplier,
        "sampling": f"Poisson: each {facts.noun} enters each step independently with probability sample_rate",
        "sample_rate": facts.plan.sample_rate,
        "expected_batch_size": facts.plan.expected_batch_size,
        "steps": steps,
        "records": facts.records,
        "units": facts.plan.records,
        **({"views": facts.privacy.views} if facts.privacy.views > 1 else {}),
        "clipping": facts.privacy.clipping,
        "max_grad_norm": facts.max_grad_norm,
        "method": repr(facts.privacy.method),
        "caveats": list(_CAVEATS) if private else [],
        "versions": provenance()["versions"],
    }


def write_statement(folder: str, facts: Facts) -> None:
    (Path(folder) / FILE).write_text(to_json(statement(facts), 2) + "\n", encoding="utf-8")


def add_to_card(card: Path, facts: Facts) -> None:
    """The model card with the statement as a section, in place of an earlier one. A card that is not there is made."""
    text = card.read_text(encoding="utf-8") if card.exists() else ""
    before, _, rest = text.partition(_START)
    after = rest.partition(_END)[2]
    found = statement(facts)
    caveats = "".join(f"- {caveat}\n" for caveat in found["caveats"])
    section = f"{_START}\n## Privacy\n\n{found['statement']}\n\n{caveats}\nNumbers: `{FILE}`.\n{_END}"
    card.write_text(before.rstrip() + "\n\n" * bool(before.strip()) + section + (after or "\n"), encoding="utf-8")


def _words(facts: Facts, epsilon: float, steps: int) -> str:
    if not math.isfinite(epsilon):
        return (
            "This model has no privacy guarantee: it was trained without noise. Treat its weights as you would treat "
            "the training data themselves."
        )
    counted = f"{facts.plan.records:,} {facts.noun}s"
    if facts.privacy.unit_of is not None:
        counted = f"{facts.records:,} records of {counted} (a unit is all records of one id)"
    return (
        f"This model was trained on {counted} with ({epsilon_text(epsilon)}, {facts.delta:g})-differential privacy, "
        f"for data that differ by one added or removed {facts.noun}: in {steps:,} steps, each on a random sample of "
        f"about {facts.plan.expected_batch_size:,} {facts.noun}s, with each {facts.noun}'s contribution limited to an "
        f"L2 norm of {facts.max_grad_norm} and Gaussian noise of {facts.noise_multiplier:.4g} times that limit. The "
        f"total was computed by the {facts.privacy.accountant.upper()} accountant."
    )
