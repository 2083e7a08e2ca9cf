"""Does an installed lsg train? Two private epochs on random records: `python benchmarks/smoke.py`."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lsg

EPSILON, DELTA, EPOCHS = 3.0, 1e-5, 2

model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 2))
engine = lsg.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(TensorDataset(torch.randn(200, 40), torch.randint(2, (200,))), batch_size=20),
    target_epsilon=EPSILON,
    target_delta=DELTA,
    epochs=EPOCHS,
    max_grad_norm=1.0,
    method=lsg.LSG(rank=2),
)
for _ in range(EPOCHS):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
spent = engine.get_epsilon(delta=DELTA)
print(f"lsg {lsg.__version__} from {lsg.__file__}: epsilon {spent:.3f}")
assert 0 < spent <= EPSILON
