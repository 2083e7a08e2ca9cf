"""A guarantee about persons: all records of one person are added or removed together."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import PrivacyEngine

PERSONS, RECORDS = 200, 1000


def main(epochs: int = 5) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 20, generator=generator)
    persons = torch.randint(0, PERSONS, (RECORDS,), generator=generator)
    model, engine = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)), PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20),  # persons a step
        target_epsilon=4.0, target_delta=1e-3, epochs=epochs, max_grad_norm=1.0,
        unit_of=persons, max_records_per_unit=4, max_physical_batch_size=32,
    )  # fmt: skip
    for _ in range(epochs):
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"epsilon {engine.get_epsilon(1e-3):.2f} for each of {loader.logical.plan.records} persons")
    return engine.get_epsilon(1e-3)


if __name__ == "__main__":
    main()
