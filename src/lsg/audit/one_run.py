"""Black-box audit with one training run (Steinke, Nasr and Jagielski 2023): digits with canaries in, a bound out.

Each of m canaries, images of pure noise with random labels, is in the training data by a coin flip of its own. After
training the adversary sees the model alone. It guesses that the canaries whose loss fell most were in and those whose
loss fell least were out, and keeps silent on the others. The more guesses are right, the larger epsilon must be. Where
units of several records are audited, a canary is several such images of one id and one label.

Such a bound is loose: real training leaves most of what a canary could show unseen. It finds gross mistakes only.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg.audit.bounds import one_run_bound
from lsg.audit.rig import ONE_RECORD, UnitShape
from lsg.engine import PrivacyEngine
from lsg.methods import Clipping, Method
from lsg.models import SmallCNN
from lsg.tasks.digits import digits
from lsg.train.loop import classification_loss, train

# Few digits and many steps: canaries drown in a large data set, and an audit is to find what there is to find.
IMAGES, BATCH_SIZE, LR, MOMENTUM = 300, 64, 0.4, 0.9
WIDTHS = [32, 64]
GUESSED = 0.25  # the share of the canaries guessed to be in, and the share guessed to be out; fixed beforehand


@dataclass(frozen=True)
class OneRun:
    """claimed: by the accountant. bound: epsilon is at least this, wrong with probability alpha at most."""

    claimed: float
    noise_multiplier: float
    canaries: int
    guesses: int
    correct: int
    bound: float
    alpha: float
    scores: np.ndarray  # how far each canary's loss fell
    was_in: np.ndarray

    @property
    def violations(self) -> list[str]:
        if self.bound <= self.claimed:
            return []
        return [
            f"{self.correct} of {self.guesses} guesses were right: epsilon >= {self.bound:.3f}, "
            f"claimed {self.claimed:.3f}"
        ]


def audit_one_run(
    method: Method,
    clipping: Clipping,
    *,
    epsilon: float,
    delta: float,
    canaries: int,
    epochs: int,
    seed: int,
    alpha: float,
    unit: UnitShape = ONE_RECORD,
) -> OneRun:
    """Train once on digits and canaries, as any user would, and guess."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(canaries * unit.records, 1, 8, 8, generator=generator)
    labels = torch.randint(10, (canaries,), generator=generator).repeat_interleave(unit.records)
    was_in = torch.rand(canaries, generator=generator) < 0.5
    inside = was_in.repeat_interleave(unit.records)
    data = digits()
    records = TensorDataset(
        torch.cat([data.train_images[:IMAGES], images[inside]]),
        torch.cat([data.train_labels[:IMAGES], labels[inside]]),
    )
    # Each digit is a unit of its own.
    ids = [*range(IMAGES), *(IMAGES + torch.arange(canaries).repeat_interleave(unit.records)[inside]).tolist()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = SmallCNN(WIDTHS, classes=10, in_channels=1, image_size=8)
    before = _losses(model, images, labels)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        data_loader=DataLoader(records, batch_size=BATCH_SIZE),
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=epochs,
        max_grad_norm=1.0,
        method=method,
        clipping=clipping,
        noise_generator=torch.Generator().manual_seed(seed),
        views=unit.views,
        unit_of=ids if unit.named else None,
    )

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return classification_loss(model, tuple(part.repeat_interleave(unit.views, 0) for part in batch))

    train(model, optimizer, loader, engine, epochs=epochs, delta=delta, loss=loss)
    claimed = engine.get_epsilon(delta)
    engine.detach()
    scores = (before - _losses(model, images, labels)).view(canaries, unit.records).mean(1).numpy()
    guesses, correct = _guess(scores, was_in.numpy())
    bound = one_run_bound(canaries=canaries, guesses=guesses, correct=correct, delta=delta, alpha=alpha)
    return OneRun(claimed, optimizer.noise_multiplier, canaries, guesses, correct, bound, alpha, scores, was_in.numpy())


def _guess(scores: np.ndarray, was_in: np.ndarray) -> tuple[int, int]:
    """How many guesses are made, and how many are right."""
    count = round(GUESSED * len(scores))
    order = np.argsort(scores)
    return 2 * count, int(was_in[order[-count:]].sum() + (~was_in[order[:count]]).sum())


@torch.no_grad()
def _losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    model.eval()
    losses = F.cross_entropy(model(images), labels, reduction="none")
    model.train()
    return losses
