"""Random secrets in the training data of a language model: a run's settings in, how far its models expose them out.

The run is trained twice, with and without privacy, on its own data and the secrets. The difference shows what privacy
does to what a model learns by heart; the claimed ε says how much the private one may expose at most.
"""

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from lsg.audit.exposure import BY_CHANCE, exposures, most_allowed, random_secrets, standard_error
from lsg.distributed.group import Group
from lsg.errors import ConfigurationError
from lsg.tasks.data import Documents, TaskData
from lsg.tasks.language_models import load_language_model
from lsg.train.config import RunConfig
from lsg.train.language import LanguageScorer
from lsg.train.listener import Listener
from lsg.train.precision import choose_device, choose_precision
from lsg.train.prepare_data import prepare_data
from lsg.train.prepare_documents import encode_language
from lsg.train.run import run

REFERENCES = 1023  # secrets that no model sees
MOST = math.log2(REFERENCES + 1)  # bits of exposure: 10 tell a secret from all of them
_FOLDER = "audited-"  # what folders of models begin with
_AT_ONCE = 32  # secrets that a model reads at once
_SURE = 4.0  # standard errors beyond what ε allows, for a violation


@dataclass(frozen=True)
class Exposed:
    """What one model exposes. epsilon: what was claimed for it at delta, None where nothing was. perplexity: on
    held-out data, None before training. bits (secrets): exposure of each secret."""

    model: str
    epsilon: float | None
    perplexity: float | None
    bits: Tensor
    delta: float = 0.0

    @property
    def mean(self) -> float:
        return float(self.bits.mean())

    @property
    def error(self) -> float:
        """Standard error of the mean: by which secrets were drawn, and by which references all of them met."""
        return math.hypot(float(self.bits.std()) / math.sqrt(len(self.bits)), standard_error(REFERENCES))

    @property
    def allowed(self) -> float | None:
        """The most bits on average that the claim allows."""
        return None if self.epsilon is None else most_allowed(self.epsilon, self.delta, MOST)

    @property
    def violation(self) -> str | None:
        if self.allowed is None or self.mean - _SURE * self.error <= self.allowed:
            return None
        return (
            f"the {self.model} model exposes {self.mean:.2f} ± {self.error:.2f} bits of a secret on average, and "
            f"epsilon = {self.epsilon:.3g} allows {self.allowed:.2f}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "claimed_epsilon": self.epsilon,
            "held_out_perplexity": self.perplexity,
            "mean_exposure_bits": self.mean,
            "standard_error": self.error,
            "most_allowed_bits": self.allowed,
            "exposures": self.bits.tolist(),
        }


def audit_secrets(
    config: RunConfig,
    planted: int,
    folder: Path,
    listener: Listener,
    *,
    on_part: Callable[[str], None] = lambda part: None,
) -> list[Exposed]:
    """Of the model as it was, trained with privacy, and trained without. folder: where the trained models stay as long
    as they are looked at; they have seen the data, and one of them has no guarantee."""
    if config.kind != "generate" or config.method == "non-private":
        raise ConfigurationError("--config must hold a private run of lsg train --task generate")
    for left in folder.glob(f"{_FOLDER}*"):  # by an audit that was killed
        shutil.rmtree(left)
    every = random_secrets(planted + REFERENCES, config.seed)
    inserted, references = every[:planted], every[planted:]
    on_part("the model as it was")
    found = [Exposed("untrained", None, None, _bits(config, inserted, references, config.model))]
    bare = replace(config, method="non-private", epsilon=None, noise_multiplier=None)
    for name, settings in (("private", config), ("non-private", bare)):
        on_part(f"the {name} model")
        found.append(exposed_by(name, settings, inserted, references, folder, listener))
    return found


def exposed_by(
    name: str, config: RunConfig, inserted: list[str], references: list[str], folder: Path, listener: Listener
) -> Exposed:
    """What a model of that name exposes that is trained as the settings say, with these secrets in its data."""
    # Adapters are merged: then the folder holds a whole model.
    settings = replace(config, merge=config.lora is not None, sample_prompt="")
    with TemporaryDirectory(dir=folder, prefix=_FOLDER) as place:
        prepare = partial(prepare_data, planted=tuple(inserted))
        result = run(settings, Path(place) / "run", listener=listener, prepare=prepare)
        bits = _bits(config, inserted, references, str(Path(place) / "run" / "model"))
    return Exposed(name, result.epsilon, result.score, bits, config.delta)


def limits(found: list[Exposed]) -> list[str]:
    """Why this audit could not have shown much, if so."""
    told = [
        f"epsilon = {one.epsilon:.3g} allows {one.allowed:.1f} of {MOST:.0f} bits, so that no model can contradict it; "
        "compare with the model without privacy"
        for one in found
        if one.allowed is not None and one.allowed >= MOST
    ]
    control = found[-1]
    if control.mean - _SURE * control.error <= BY_CHANCE:
        told.append(
            f"the {control.model} model has not learnt the secrets by heart either, so that privacy made no difference "
            "here: more --epochs or a higher --lr in the settings would show one"
        )
    return told


def _bits(config: RunConfig, inserted: list[str], references: list[str], model: str) -> Tensor:
    """The exposure of each secret that was inserted, by the language model in this folder or of this name."""
    likelihoods = _log_likelihoods(config, inserted + references, model)
    return exposures(likelihoods[: len(inserted)], likelihoods[len(inserted) :])


@torch.no_grad()
def _log_likelihoods(config: RunConfig, texts: list[str], name: str) -> Tensor:
    device = choose_device(config.device)
    model = load_language_model(name).to(device).eval()
    documents = TaskData(Documents(texts, [""] * len(texts) if model.config.is_encoder_decoder else None), {}, (), "")
    encoded = encode_language(config, documents, device, Listener())[0]["train"]
    causal = not model.config.is_encoder_decoder
    precision = choose_precision(config.precision, device)
    scorer = LanguageScorer(precision, device, 1, causal=causal, group=Group())
    rows = torch.arange(len(texts)).split(_AT_ONCE)
    return torch.cat([scorer.log_likelihoods(model, encoded.__getitems__(some))[0] for some in rows]).cpu()
