"""Several processes: the same three lines. Each logical batch is shared, noise is added once.

torchrun --nproc_per_node=2 examples/two_processes.py
"""

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lsg import PrivacyEngine


def main(epochs: int = 2) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(200, 20)
    model, engine = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)), PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=20),  # of all processes together
        target_epsilon=4.0, target_delta=1e-3, epochs=epochs, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(epochs):
        for inputs, labels in loader:
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
    print(f"rank {dist.get_rank()}: {hashlib.sha256(weights).hexdigest()[:8]}, epsilon {engine.get_epsilon(1e-3):.2f}")
    dist.destroy_process_group()
    return engine.get_epsilon(1e-3)


if __name__ == "__main__":
    main()
