"""Counts the bytes of collectives a logical step: RoBERTa-base's shape in N processes on this machine (gloo), JSON out.

    python benchmarks/scale_bytes.py [--processes 2] [--ways lsg ddp ...] [OUTPUT]      # results/scale/bytes.json

Model: the preset "encoder" of `lsg bench`, 12 layers of 768, rank 8, sparsity 0.5; embedding tables are frozen. Samples
are few and short, which changes no byte. A step takes 1, 2 and 8 micro-batches in each process. Bytes are those of the
whole tensors (`scale_counter.py`) in the first process, for the third step; the first two also have what is sent once.
"""

import argparse
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from scale_counter import CollectiveBytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lsg import LSG, PrivacyEngine
from lsg.bench.presets import workload
from lsg.bench.shapes import preset
from lsg.train.provenance import provenance

OUTPUT = Path(__file__).parents[1] / "results" / "scale" / "bytes.json"
PRESET = preset("encoder").scaled(tokens=16, micro_batch=2)
MICRO_BATCHES, STEPS = (1, 2, 8), 3
Step = Callable[[list[tuple[Tensor, Tensor]]], None]  # the micro-batches of one process


def make_model() -> nn.Module:
    return workload(PRESET, torch.device("cpu")).make_model()


def own_data(records: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(5, PRESET.vocabulary, (records, PRESET.tokens), generator=generator)
    return TensorDataset(tokens, torch.randint(0, 2, (records,), generator=generator))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).logits, y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3)


# --- ways to train: each counts one step after the other ------------------------------------------------------------


def lsg_steps(counter: CollectiveBytes, micro_batches: int) -> Iterator[dict[str, Any]]:
    """The Poisson rate is 1, so that each step has all records: as many as fill each process's micro-batches."""
    records = dist.get_world_size() * micro_batches * PRESET.micro_batch
    engine = PrivacyEngine(accountant="rdp")
    with counter:
        model = make_model()
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(own_data(records), batch_size=records),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            method=LSG(rank=PRESET.rank, sparsity=PRESET.sparsity),
            max_physical_batch_size=PRESET.micro_batch,
        )
        for _ in range(STEPS):
            seen = 0
            for x, y in loader:  # an epoch is one step
                loss(model, x, y).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen += 1
            yield counted(counter, seen)
    assert sum(steps for _, _, steps in engine.accountant.history) == STEPS


def ddp_steps(counter: CollectiveBytes, micro_batches: int, each: bool = False) -> Iterator[dict[str, Any]]:
    """Not private. each: gradients are reduced after each micro-batch, as DDP does without `no_sync`."""
    with counter:
        model = DistributedDataParallel(make_model())
        optimizer = sgd(model)
        for _ in range(STEPS):
            for number in range(micro_batches):
                last = number == micro_batches - 1
                with contextlib.nullcontext() if last or each else model.no_sync():
                    loss(model, *own_data(PRESET.micro_batch).tensors).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield counted(counter, micro_batches)


def opacus_steps(counter: CollectiveBytes, micro_batches: int) -> Iterator[dict[str, Any]]:
    """Opacus's hooks under its DPDDP; micro-batches that end no step are announced, as its BatchMemoryManager does."""
    from opacus import PrivacyEngine as OpacusEngine
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel

    with counter:
        model = DifferentiallyPrivateDistributedDataParallel(make_model())
        model, optimizer, _ = OpacusEngine(accountant="rdp").make_private(
            module=model,
            optimizer=sgd(model),
            data_loader=DataLoader(own_data(PRESET.micro_batch), batch_size=PRESET.micro_batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        for _ in range(STEPS):
            for number in range(micro_batches):
                optimizer.signal_skip_step(number != micro_batches - 1)
                loss(model, *own_data(PRESET.micro_batch).tensors).backward()
                optimizer.step()
                optimizer.zero_grad()
            yield counted(counter, micro_batches)


WAYS: dict[str, Callable[[CollectiveBytes, int], Iterator[dict[str, Any]]]] = {
    "lsg": lsg_steps,
    "ddp": ddp_steps,
    "ddp, without no_sync": lambda counter, number: ddp_steps(counter, number, each=True),
    "opacus dpddp": opacus_steps,
}


def counted(counter: CollectiveBytes, micro_batches: int) -> dict[str, Any]:
    """What was sent since the last time."""
    found = {"micro_batches": micro_batches, "bytes": dict(counter.bytes), "calls": dict(counter.calls)}
    counter.clear()
    return found | {"total": sum(found["bytes"].values())}


# --- processes ------------------------------------------------------------------------------------------------------


def work(rank: int, processes: int, port: int, ways: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    found = []
    for way in ways:
        for micro_batches in MICRO_BATCHES:
            steps = list(WAYS[way](CollectiveBytes(), micro_batches))
            found.append({"way": way, "first_step": steps[0], "step": steps[-1]})
            if rank == 0:
                print(way, steps[-1], flush=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=OUTPUT)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.processes, free_port(), options.ways, folder)
        torch.multiprocessing.spawn(work, arguments, nprocs=options.processes)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.processes)]
    trained = [p for p in make_model().parameters() if p.requires_grad]
    document = {
        "provenance": provenance(),
        "processes": options.processes,
        "preset": {name: getattr(PRESET, name) for name in ("name", "width", "layers", "rank", "sparsity")},
        "dense_bytes": sum(4 * p.numel() for p in trained),
        "tensors": len(trained),
        "ranks_agree": all(found == ranks[0] for found in ranks),
        "runs": ranks[0],
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
