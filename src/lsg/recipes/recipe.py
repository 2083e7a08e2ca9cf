"""A recipe: all that a private run needs beside its data, its model and ε, with the reasons for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsg.methods import Clipping, Method

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Fields are named as the options of `lsg train`. why: one reason a line, for people.

    model: a zoo name where images are trained from scratch; None where the user's model is taken.
    trainable: "head", "bias", "paper" (matrices and the head) or "all". trained: the same in words, where others are
    needed. pooling: what the head of a text model sees. counted: what `records` and `batch_size` count, in words.
    """

    records: int
    epsilon: float
    delta: float
    model: str | None = None
    trainable: str
    trained: str = ""
    pooling: str = "model"
    method: Method
    clipping: Clipping = "automatic"
    max_grad_norm: float = 1.0
    optimizer: str = "adam"
    lr: float
    head_lr: float = 1.0
    lr_schedule: str = "linear"
    warmup: float = 0.0
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int
    epochs: int
    averaging: float = 0.0
    views: int = 1
    counted: str = "records"
    why: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """For `PrivacyEngine.make_private_with_epsilon`. The loader's batch size is yours to set: `batch_size`."""
        return {
            "target_epsilon": self.epsilon,
            "target_delta": self.delta,
            "epochs": self.epochs,
            "max_grad_norm": self.max_grad_norm,
            "clipping": self.clipping,
            "method": self.method,
            "views": self.views,
        }

    def _optimizer(self) -> str:
        return f"sgd with momentum {self.momentum:g}" if self.optimizer == "sgd" and self.momentum else self.optimizer

    def __str__(self) -> str:
        clip = (
            "automatic clipping: no threshold to guess"
            if self.clipping == "automatic"
            else (f"{self.clipping} clipping at {self.max_grad_norm:g}")
        )
        extras = [f"{self.views} views a record"] if self.views > 1 else []
        extras += [f"weights averaged over the last {100 * self.averaging:g} % of steps"] if self.averaging else []
        batch = "all" if self.batch_size == self.records else f"about {self.batch_size:,}"
        return "\n".join(
            [
                f"recipe for {self.records:,} {self.counted} at ε = {self.epsilon:g}, δ = {self.delta:g}:",
                f"  train {self.trained or _TRAINED[self.trainable]}"
                + (f" of {self.model}" if self.model else "")
                + _SEES[self.pooling],
                f"  {self.method}, {', '.join([clip, *extras])}",
                f"  {self.epochs} epochs, steps on {batch} {self.counted}; {self._optimizer()}, rate {self.lr:g} "
                + (f"({self.lr * self.head_lr:g} for the head), " if self.head_lr != 1 else "")
                + self.lr_schedule,
                f"  why: {' '.join(self.why)}",
            ]
        )


_TRAINED = {
    "head": "the head alone",
    "bias": "biases, norms and the head",
    "paper": "weight matrices and the head",
    "all": "everything",
}
_SEES = {"model": "", "mean": ", which sees the mean of a text's tokens", "first": ", which sees a text's first token"}


def writes_texts(model: nn.Module) -> bool:
    """Whether it is a language model of transformers, or one with adapters."""
    can_generate = getattr(model, "can_generate", None)
    return is_transformer(model) and callable(can_generate) and bool(can_generate())


def tags_words(model: nn.Module) -> bool:
    """Whether it is a model of transformers with an answer for each token."""
    return is_transformer(model) and any("ForTokenClassification" in kind.__name__ for kind in type(model).__mro__)


def has_adapters(model: nn.Module | None) -> bool:
    """Whether PEFT has put adapters into it."""
    return hasattr(model, "peft_config")


def is_transformer(model: nn.Module) -> bool:
    """Whether transformers made it: those models are pretrained, all others are taken to begin from scratch."""
    return hasattr(getattr(model, "config", None), "model_type")
