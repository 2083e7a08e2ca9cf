"""Seconds of each micro-batch after the first ones, of the cpu-encoder bench's shape, through lsg's public API alone.

    PYTHONPATH=SOURCE_TREE python benchmarks/later_batches.py

So it runs with any commit's source tree; `check_cost.py later` compares two of them. Prints a list as JSON.
"""

import json
import time

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import RobertaConfig, RobertaForSequenceClassification

from lsg import LSG, PrivacyEngine

RECORDS, TOKENS, MICRO_BATCH, WARM, TIMED = 64, 64, 16, 4, 40


def main() -> None:
    torch.manual_seed(0)
    config = RobertaConfig(
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
        vocab_size=1000,
        max_position_embeddings=TOKENS + 8,
    )
    model = RobertaForSequenceClassification(config)
    data = TensorDataset(torch.randint(2, 1000, (RECORDS, TOKENS)), torch.randint(2, (RECORDS,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        data_loader=DataLoader(data, batch_size=RECORDS),  # every record in every step: micro-batches of one size
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=LSG(rank=8, sparsity=0.5),
        max_physical_batch_size=MICRO_BATCH,
        noise_generator=torch.Generator().manual_seed(0),
    )
    seconds: list[float] = []
    while len(seconds) < WARM + TIMED:
        start = time.perf_counter()
        for ids, labels in loader:
            F.cross_entropy(model(input_ids=ids).logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            now = time.perf_counter()
            seconds.append(now - start)
            start = now
    print(json.dumps(seconds[WARM:]))


if __name__ == "__main__":
    main()
