"""The workloads of `lsg bench` by name, in numbers: `presets.py` makes models and data of them."""

from dataclasses import dataclass, replace
from typing import Any

from lsg.errors import ConfigurationError

PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Preset:
    """A workload. `micro_batches` of `micro_batch` samples make a logical step.

    weights: the precision that they are kept in; those in "bf16" are computed with as they are, without autocast.
    tied: the embedding table is the head, too. checkpointing: activations of layers are computed again in the backward.
    """

    name: str
    kind: str  # encoder, decoder, causal or wrn
    width: int
    layers: int
    tokens: int
    micro_batch: int
    micro_batches: int
    rank: int = 8
    sparsity: float = 0.5
    feed_forward: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocabulary: int = 1000
    weights: str = "fp32"
    tied: bool = False
    checkpointing: bool = False

    def scaled(self, **changes: Any) -> "Preset":
        return replace(self, **changes)

    def precision(self, asked: str) -> str:
        """To compute in; where none is asked for, that of the weights."""
        if asked and asked not in PRECISIONS:
            raise ConfigurationError(f"precision '{asked}' is unknown; choose from {', '.join(PRECISIONS)}")
        if asked and self.weights != "fp32" and asked != self.weights:
            raise ConfigurationError(
                f"precision '{asked}': preset '{self.name}' has weights in {self.weights} and is computed in that"
            )
        return asked or self.weights


# Llama 3 8B: 64k tokens a step.
_LLAMA = Preset(
    "llama-8b",
    "causal",
    width=4096,
    layers=32,
    tokens=512,
    micro_batch=16,
    micro_batches=8,
    feed_forward=14336,
    heads=32,
    kv_heads=8,
    vocabulary=128256,
    weights="bf16",
    checkpointing=True,
)
_TINY_LLAMA = {"width": 128, "layers": 2, "feed_forward": 352, "heads": 4, "kv_heads": 2, "vocabulary": 512}

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("encoder", "encoder", width=768, layers=12, tokens=128, micro_batch=128, micro_batches=8),
        Preset("encoder-large", "encoder", width=1024, layers=24, tokens=128, micro_batch=64, micro_batches=4),
        Preset("decoder", "decoder", width=4096, layers=2, tokens=256, micro_batch=32, micro_batches=2),
        Preset(
            "wrn28-4", "wrn", width=4, layers=28, tokens=32, micro_batch=500, micro_batches=2, rank=16, sparsity=0.3
        ),
        _LLAMA,
        _LLAMA.scaled(name="llama-1b", width=2048, layers=16, feed_forward=8192, tied=True),  # Llama 3.2 1B
        Preset("cpu-encoder", "encoder", width=384, layers=4, tokens=64, micro_batch=16, micro_batches=4),
        Preset("cpu-wrn", "wrn", width=1, layers=28, tokens=16, micro_batch=16, micro_batches=2, rank=4, sparsity=0.3),
        _LLAMA.scaled(name="cpu-llama", tokens=32, micro_batch=4, micro_batches=2, **_TINY_LLAMA),
    )
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigurationError(f"preset '{name}' is unknown; choose from {', '.join(PRESETS)}")
    return PRESETS[name]
