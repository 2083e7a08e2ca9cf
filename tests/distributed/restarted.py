"""A script of a user's own, for torchrun: trains with a ledger and a checkpoint; where told to, one rank dies once.

    restarted.py FOLDER [die]

Rank 0 leaves the weights, what was spent, and how often the processes were started again in FOLDER.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn

from lsg import load_checkpoint, save_checkpoint
from lsg.distributed.launch import joined
from tests.distributed.runs import Setting, begin, train_epoch

SETTING = Setting(records=40, batch_size=8, epochs=2)
SAVED, DIES = 2, 4  # steps


def main(folder: Path, rank: int, start: int, *, die: bool) -> None:
    file = folder / "checkpoint"
    run = begin(SETTING, wrap=lambda model: nn.Sequential(model, nn.Dropout(0.2)), ledger=folder / "ledger")
    torch.manual_seed(100 + rank)
    if file.exists():
        load_checkpoint(file, engine=run.engine)
    else:
        save_checkpoint(file, engine=run.engine)

    def stepped() -> None:
        steps = len(run.engine.accountant)
        if steps == SAVED:
            save_checkpoint(file, engine=run.engine)
        if steps == DIES and die and rank == 1:
            os._exit(9)

    run.optimizer.on_logical_step(stepped)
    while run.loader.epoch < SETTING.epochs:
        train_epoch(run)
    if rank == 0:
        torch.save((run.model.state_dict(), run.engine.accountant.history, start), folder / "end.pt")


if __name__ == "__main__":
    with joined() as group:
        start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        main(Path(sys.argv[1]), group.rank, start, die=len(sys.argv) > 2 and start == 0)
