"""Samples a second on one CPU core by size of the micro-batch: what `lsg train` takes there if nothing is set.

    python benchmarks/cpu_micro_batches.py OUTPUT.json

Steps of LSG at random images of CIFAR-10's shape and random texts of 32 tokens; sizes in turn, the median of three.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import RobertaConfig, RobertaForSequenceClassification

from lsg import LSG, PrivacyEngine
from lsg.models.wrn import wrn28
from lsg.train.provenance import provenance

SIZES = {"wrn28-2": (16, 32, 64, 128, 256, 512), "encoder 4 x 384": (16, 32, 64, 128, 256)}
_TOKENS = 32


def model_and_inputs(name: str, size: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "wrn28-2":
        return wrn28(2, 10, 3), torch.randn(size, 3, 32, 32)
    shape: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 1000}
    model = RobertaForSequenceClassification(RobertaConfig(**shape, intermediate_size=1536))
    return model, torch.randint(3, 1000, (size, _TOKENS))


def step_of(name: str, size: int) -> Any:
    model, x = model_and_inputs(name, size)
    _, optimizer, _ = PrivacyEngine(accountant="rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(4 * size)), batch_size=size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=LSG(),
        noise_generator=torch.Generator().manual_seed(0),
    )
    y = torch.zeros(size, dtype=torch.long)

    def step() -> None:
        epoch = optimizer.clock.enter_epoch()
        optimizer.clock.begin_micro_batch(epoch, size=size, last=True)
        out = model(x)
        F.cross_entropy(out if isinstance(out, Tensor) else out.logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main(output: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[int, float]] = {}
    for name, sizes in SIZES.items():
        steps = {size: step_of(name, size) for size in sizes}
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for number in range(4):
            for size, step in steps.items():
                began = time.perf_counter()
                step()
                if number:
                    seconds[size].append(time.perf_counter() - began)
        found[name] = {size: round(size / statistics.median(times), 2) for size, times in seconds.items()}
        print(name, found[name])
    about = {"command": " ".join(["python", *sys.argv]), "seed": 0, "threads": 1, "samples_per_second": found}
    output.write_text(json.dumps({**about, "provenance": provenance()}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
