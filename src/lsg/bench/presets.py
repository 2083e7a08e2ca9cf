"""What is timed: a name in, a model with its loss and one logical batch out. Weights and data are random."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.bench.shapes import Preset
from lsg.errors import ConfigurationError
from lsg.losses import per_sequence
from lsg.models import wrn28

Loss = Callable[[Callable[..., Any], Tensor, Tensor], Tensor]  # model, x, y -> the mean over the samples


def class_loss(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Of one label a sample."""
    out = model(x)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.float(), y)


def causal_loss(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Of the next token: each sequence is a record, and its loss the mean over its tokens."""
    return per_sequence(model(x).logits, y, shift=True)


@dataclass(frozen=True)
class Workload:
    """make_model: a fresh model with the same weights each time. batches: the micro-batches of a logical step."""

    make_model: Callable[[], nn.Module]
    batches: list[tuple[Tensor, Tensor]]
    loss: Loss = class_loss

    @property
    def samples(self) -> int:
        return sum(len(x) for x, _ in self.batches)


def workload(preset: Preset, device: torch.device) -> Workload:
    """The workload on a device. Embedding tables are frozen for every contender, as RGP does; all else is trained."""
    generator = torch.Generator().manual_seed(0)
    # lsg's kernels on a GPU are for channels last; PyTorch's group norms on a CPU are slow for it.
    layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    make, classes = _MAKERS[preset.kind](preset)

    def model() -> nn.Module:
        torch.manual_seed(0)
        with _made_in_place(preset, device):
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
            x = torch.randint(5, preset.vocabulary, (preset.micro_batch, preset.tokens), generator=generator)
        if preset.kind == "causal":
            return x.to(device), x.to(device)
        y = torch.randint(0, classes, (preset.micro_batch,), generator=generator)
        return x.to(device), y.to(device)

    loss = causal_loss if preset.kind == "causal" else class_loss
    in_own_precision = loss if preset.weights == "fp32" else _without_autocast(loss)
    return Workload(model, [batch() for _ in range(preset.micro_batches)], in_own_precision)


@contextmanager
def _made_in_place(preset: Preset, device: torch.device) -> Iterator[None]:
    """Weights that are kept in half precision are made so, on the device: at first they would not fit otherwise."""
    if preset.weights == "fp32":
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _without_autocast(loss: Loss) -> Loss:
    def computed(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return loss(model, x, y)

    return computed


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
        vocab_size=preset.vocabulary,
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
        vocab_size=preset.vocabulary,
        max_position_embeddings=preset.tokens,
        pad_token_id=0,
        use_cache=False,
    )
    return lambda: LlamaForSequenceClassification(config), 2


def _causal(preset: Preset) -> tuple[Callable[[], nn.Module], int]:
    _need_transformers(preset)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=preset.width,
        num_hidden_layers=preset.layers,
        num_attention_heads=preset.heads or preset.width // 128,
        num_key_value_heads=preset.kv_heads,
        intermediate_size=preset.feed_forward or 4 * preset.width,
        vocab_size=preset.vocabulary,
        max_position_embeddings=preset.tokens,
        tie_word_embeddings=preset.tied,
        use_cache=False,
    )

    def make() -> nn.Module:
        model = LlamaForCausalLM(config)
        if preset.checkpointing:
            # Nothing is drawn in a layer. To put random states back would read them from the device, which ends a
            # recording.
            settings = {"use_reentrant": False, "preserve_rng_state": False}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
            model.disable_input_require_grads()  # what transformers turns on for the other kind of checkpointing
        return model

    return make, preset.vocabulary


def _wrn(preset: Preset) -> tuple[Callable[[], nn.Module], int]:
    return lambda: wrn28(preset.width), 10


_MAKERS: dict[str, Callable[[Preset], tuple[Callable[[], nn.Module], int]]] = {
    "encoder": _encoder,
    "decoder": _decoder,
    "causal": _causal,
    "wrn": _wrn,
}
