"""One rank of a small run of PrivateTrainer, started by torchrun: its weights go into a file for each rank."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.trainer_runs import trainer, weights

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    args = {"gradient_accumulation_steps": 1, "max_steps": 5, "ddp_backend": "gloo"}
    own = trainer(folder, "causal", args=args)
    own.train()
    own.save_model(str(folder / "model"))
    found = {"weights": weights(own.model), "epsilon": own.get_epsilon(), "steps": own.state.global_step}
    torch.save(found, folder / f"rank-{dist.get_rank()}.pt")
    dist.destroy_process_group()
