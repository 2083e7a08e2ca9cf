"""Digits with four augmented views of each record: averaged before the clip, so that they cost no privacy."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine
from lsg.models import small_cnn

VIEWS = 4


def shifted(images: torch.Tensor) -> torch.Tensor:
    """Each image by a random step of its own in each direction."""
    padded = F.pad(images, (1, 1, 1, 1))
    steps = torch.randint(0, 3, (len(images), 2)).tolist()
    return torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, steps, strict=True)])


def main(records: int = 1500, epochs: int = 8) -> float:
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float().view(-1, 1, 8, 8)[:records] / 16, labels[:records])
    model, engine = small_cnn(classes=10, in_channels=1, image_size=8), PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=DataLoader(data, batch_size=200),
        target_epsilon=3.0, target_delta=1e-4, epochs=epochs, max_grad_norm=1.0, method=DPSGD(),
        views=VIEWS, max_physical_batch_size=256,  # rows: 64 records
    )  # fmt: skip
    for _ in range(epochs):
        for x, y in loader:
            views = shifted(x.repeat_interleave(VIEWS, 0))  # the views of a record are adjacent
            F.cross_entropy(model(views), y.repeat_interleave(VIEWS)).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"epsilon {engine.get_epsilon(1e-4):.2f}")
    return engine.get_epsilon(1e-4)


if __name__ == "__main__":
    main()
