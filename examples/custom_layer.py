"""A layer of your own: lsg runs it through vmap, record by record, and checks that it keeps records apart."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import LSG, PrivacyEngine, explain


class Gate(nn.Module):
    """Each feature times a trained function of itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope, self.offset = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.slope * x + self.offset)


def main(epochs: int = 3) -> float:
    torch.manual_seed(0)
    x = torch.randn(300, 20)
    model, engine = nn.Sequential(nn.Linear(20, 128), Gate(128), nn.Linear(128, 2)), PrivacyEngine()
    print(explain(model, LSG()))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=30),
        target_epsilon=4.0, target_delta=1e-4, epochs=epochs, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(epochs):
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"epsilon {engine.get_epsilon(1e-4):.2f}")
    return engine.get_epsilon(1e-4)


if __name__ == "__main__":
    main()
