"""|W| and |∂W| of one layer: a run's model and a batch of its data in, two matrices out.

One plain backward, without any privacy.

The paper's figure 1 shows them for a pretrained encoder, and rests LSG on two observations: few entries are large, and
the large ones lie in rows and columns, that is, they belong to units. `Intensity.observation` puts numbers on both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg.errors import ConfigurationError
from lsg.tasks.models import load_trained_image_model
from lsg.train.config import RunConfig
from lsg.train.listener import Listener
from lsg.train.precision import choose_device
from lsg.train.prepare_data import prepare_data
from lsg.train.prepare_model import prepare_model

LARGEST_SHARE = 0.1
BATCH = 256


@dataclass(frozen=True)
class Intensity:
    """Absolute values (outputs, inputs) of one weight and of its gradient."""

    layer: str
    weight: np.ndarray
    gradient: np.ndarray

    @property
    def observation(self) -> str:
        share = 100 * _share_of_largest(self.gradient)
        inputs, outputs = (_rank_correlation(self.weight.sum(axis), self.gradient.sum(axis)) for axis in (0, 1))
        return (
            f"The largest {LARGEST_SHARE:.0%} of the entries hold {share:.0f} % of |∂W|. "
            f"Rank correlation of Σ|W| and Σ|∂W| over input units {inputs:+.2f}, over output units {outputs:+.2f}"
        )


def run_intensity(config: RunConfig, layer: str = "", trained: Path | None = None) -> Intensity:
    """On the first records of the task. trained: a run's image model, in place of the one that a run starts from."""
    device = choose_device(config.device)
    data = prepare_data(config, device, Listener())
    model = prepare_model(config, data, device, Listener())
    if trained is not None:
        model = load_trained_image_model(trained).to(device)
    model.eval()  # without dropout the figure repeats
    batch = data.train.__getitems__(range(min(BATCH, len(data.train))))

    def loss(model: nn.Module) -> Tensor:
        return model(**batch).loss if isinstance(batch, dict) else F.cross_entropy(model(batch[0]), batch[1])

    return measure_intensity(model, loss, layer)


def measure_intensity(model: nn.Module, loss: Callable[[nn.Module], Tensor], layer: str = "") -> Intensity:
    """One backward of `loss(model)`. layer: a module's or a weight's name; "" takes the first weight worth projecting.

    The first fully connected layer of a transformer block is what the paper shows; here "" takes the first of the
    largest weights outside embeddings, which is that one in a transformer.
    """
    name, weight = _find(model, layer)
    model.zero_grad(set_to_none=True)
    needed = weight.requires_grad
    weight.requires_grad_(True)
    (gradient,) = torch.autograd.grad(loss(model), [weight])
    weight.requires_grad_(needed)
    return Intensity(name, *(t.detach().abs().flatten(1).float().cpu().numpy() for t in (weight, gradient)))


def _find(model: nn.Module, layer: str) -> tuple[str, nn.Parameter]:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    weights = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in embeddings
    }
    if layer:
        for name in (layer, f"{layer}.weight"):
            if name in weights:
                return name, weights[name]
        raise ConfigurationError(f"--layer '{layer}' is none of the model's weights: {', '.join(weights)}")
    if not weights:
        raise ConfigurationError("figure-weights: the model has no weight matrix")
    largest = max(parameter.numel() for parameter in weights.values())
    return next((name, weight) for name, weight in weights.items() if weight.numel() == largest)


def _share_of_largest(values: np.ndarray) -> float:
    ordered = np.sort(values, axis=None)[::-1]
    total = float(ordered.sum())
    return float(ordered[: math.ceil(LARGEST_SHARE * ordered.size)].sum()) / total if total else 0.0


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, without ties: these are sums of many real numbers."""
    if len(a) < 2:
        return math.nan
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])
