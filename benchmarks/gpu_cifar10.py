"""CIFAR-10 on a leased GPU: cells of `gpu-hour`'s table 2, ended before the lease does.

    python benchmarks/gpu_cifar10.py CIFAR10 OUTPUT SECONDS METHOD:SEED...

The cells go to OUTPUT/cells in the order given. Start it again to go on: complete ones are skipped, and one that was
cut off goes on from its checkpoint.
"""

import sys
from dataclasses import replace
from pathlib import Path

from gpu_cells import Lease

from lsg.reproduce.scales import scale
from lsg.reproduce.store import cell_name

RECORDS = 50_000


def main(data: str, output: Path, seconds: float, wanted: list[str]) -> None:
    workload = scale("gpu-hour").using({"image": data}, {}).image
    lease = Lease(output / "cells", seconds, RECORDS, checkpoints=True)
    for cell in wanted:
        method, seed = cell.split(":")
        config = replace(workload.config(method), seed=int(seed))
        lease.run(cell_name(config), config)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
