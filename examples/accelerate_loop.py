"""Accelerate: prepare everything first, then make it private. Runs alone, or under `accelerate launch`."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import PrivacyEngine


def main(records: int = 400, epochs: int = 3) -> float:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.randn(records, 20)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=40, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    engine = PrivacyEngine()
    # Accelerate wraps the optimizer, and the model where there are several processes. What lsg returns takes the place
    # of all three: its own loader samples, and no step is Accelerate's.
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer.optimizer, data_loader=loader, target_epsilon=4.0, target_delta=1e-4,
        epochs=epochs, max_grad_norm=1.0, max_physical_batch_size=16,
    )  # fmt: skip
    for _ in range(epochs):
        for batch in loader:
            inputs, labels = (tensor.to(accelerator.device) for tensor in batch)
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()  # accelerator.backward(loss) would divide it, if it were told to accumulate gradients
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"epsilon {engine.get_epsilon(1e-4):.2f}")
    return engine.get_epsilon(1e-4)


if __name__ == "__main__":
    main()
