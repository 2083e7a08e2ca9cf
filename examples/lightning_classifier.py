"""Lightning: a classifier of digits in Lightning's Trainer. Needs `pip install lightning`.

python examples/lightning_classifier.py
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import DPSGD, PrivacyEngine
from lsg.integrations.lightning import PrivateTraining


class Digits(L.LightningModule):
    """The private model is `self.model`: the loss is computed around it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)

    def training_step(self, batch, index):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return self.optimizer


def main(epochs: int = 10, records: int = 1500) -> float:
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    train, held_out = (torch.utils.data.Subset(data, part) for part in (range(records), range(1500, len(data))))
    module, engine = Digits(), PrivacyEngine()
    _, module.optimizer, loader = engine.make_private_with_epsilon(
        module=module.model, optimizer=module.optimizer, data_loader=DataLoader(train, batch_size=records // 6),
        target_epsilon=3.0, target_delta=1e-4, epochs=epochs, max_grad_norm=1.0, method=DPSGD(),
        max_physical_batch_size=64,
    )  # fmt: skip
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        callbacks=[PrivateTraining(engine, module.optimizer, loader, delta=1e-4)], num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(module, loader, DataLoader(held_out, batch_size=300))
    epsilon = engine.get_epsilon(1e-4)
    print(f"epsilon {epsilon:.2f}, accuracy {trainer.callback_metrics['accuracy']:.2f}")
    return epsilon


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args().epochs)
