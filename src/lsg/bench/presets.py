"""What is timed: a name in, a model with its loss and one logical batch out. Weights and data are random."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError
from lsg.models import wrn28


@dataclass(frozen=True)
class Preset:
    """A workload. `micro_batches` of `micro_batch` samples make a logical step."""

    name: str
    kind: str  # encoder, decoder or wrn
    width: int
    layers: int
    tokens: int
    micro_batch: int
    micro_batches: int
    rank: int = 8
    sparsity: float = 0.5
    feed_forward: int | None = None
    heads: int | None = None

    def scaled(self, **changes: Any) -> "Preset":
        return replace(self, **changes)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("encoder", "encoder", width=768, layers=12, tokens=128, micro_batch=128, micro_batches=8),
        Preset("encoder-large", "encoder", width=1024, layers=24, tokens=128, micro_batch=64, micro_batches=4),
        Preset("decoder", "decoder", width=4096, layers=2, tokens=256, micro_batch=32, micro_batches=2),
        Preset(
            "wrn28-4", "wrn", width=4, layers=28, tokens=32, micro_batch=500, micro_batches=2, rank=16, sparsity=0.3
        ),
        Preset("cpu-encoder", "encoder", width=384, layers=4, tokens=64, micro_batch=16, micro_batches=4),
        Preset("cpu-wrn", "wrn", width=1, layers=28, tokens=16, micro_batch=16, micro_batches=2, rank=4, sparsity=0.3),
    )
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigurationError(f"preset '{name}' is unknown; choose from {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class Workload:
    """make_model: a fresh model with the same weights each time. batches: the micro-batches of a logical step."""

    make_model: Callable[[], nn.Module]
    batches: list[tuple[Tensor, Tensor]]

    @property
    def samples(self) -> int:
        return sum(len(x) for x, _ in self.batches)

    @staticmethod
    def loss(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        logits = out if isinstance(out, Tensor) else out.logits
        return F.cross_entropy(logits.float(), y)


def workload(preset: Preset, device: torch.device) -> Workload:
    """The workload on a device. Embedding tables are frozen for every contender, as RGP does; all else is trained."""
    generator = torch.Generator().manual_seed(0)
    # lsg's kernels on a GPU are for channels last; PyTorch's group norms on a CPU are slow for it.
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    make, classes = _MAKERS[preset.kind](preset)

    def model() -> nn.Module:
        torch.manual_seed(0)
        made = make()
        for module in made.modules():
            if isinstance(module, nn.Embedding):
                module.requires_grad_(False)
        made = made.to(device).train()
        return made.to(memory_format=layout) if preset.kind == "wrn" else made  # type: ignore[call-overload]

    def batch() -> tuple[Tensor, Tensor]:
        if preset.kind == "wrn":
            x = torch.randn(preset.micro_batch, 3, preset.tokens, preset.tokens, generator=generator)
            x = x.contiguous(memory_format=layout)
        else:
            x = torch.randint(5, 1000, (preset.micro_batch, preset.tokens), generator=generator)
        y = torch.randint(0, classes, (preset.micro_batch,), generator=generator)
        return x.to(device), y.to(device)

    return Workload(model, [batch() for _ in range(preset.micro_batches)])


def _need_transformers(preset: Preset) -> None:
    if find_spec("transformers") is None:
        raise ConfigurationError(
            f"preset '{preset.name}' needs the package transformers: pip install 'lsg-dp[transformers]'"
        )


def _encoder(preset: Preset) -> tuple[Callable[[], nn.Module], int]:
    _need_transformers(preset)
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        hidden_size=preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads or preset.width // 64,
        intermediate_size=preset.feed_forward or 4 * preset.width,
        vocab_size=1000,
        max_position_embeddings=preset.tokens + 8,
    )
    return lambda: RobertaForSequenceClassification(config), 2


def _decoder(preset: Preset) -> tuple[Callable[[], nn.Module], int]:
    _need_transformers(preset)
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        hidden_size=preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads or preset.width // 128,
        intermediate_size=preset.feed_forward or 11008,
        vocab_size=1000,
        max_position_embeddings=preset.tokens,
        pad_token_id=0,
        use_cache=False,
    )
    return lambda: LlamaForSequenceClassification(config), 2


def _wrn(preset: Preset) -> tuple[Callable[[], nn.Module], int]:
    return lambda: wrn28(preset.width), 10


_MAKERS: dict[str, Callable[[Preset], tuple[Callable[[], nn.Module], int]]] = {
    "encoder": _encoder,
    "decoder": _decoder,
    "wrn": _wrn,
}
