"""Run on a GPU machine: where the peak memory of a step comes from, plain and with LSG, phase by phase and op by op."""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from lsg.bench.contenders import Setting, attach
from lsg.bench.presets import workload
from lsg.bench.shapes import preset
from lsg.methods import LSG

GIB = 2**30


class Meter:
    """Prints memory in tensors at the end of a phase, and its peak since the last one."""

    def __init__(self) -> None:
        self.start = torch.cuda.memory_allocated()

    def __call__(self, phase: str) -> None:
        torch.cuda.synchronize()
        now, peak = torch.cuda.memory_allocated() - self.start, torch.cuda.max_memory_allocated() - self.start
        print(f"  {phase:22} holds {now / GIB:6.2f} GiB, peak {peak / GIB:6.2f} GiB", flush=True)
        torch.cuda.reset_peak_memory_stats()


def saved_by_node(loss: Tensor) -> Counter[str]:
    """Node of the autograd graph -> bytes of the storages that it saved, each counted once, at its first node."""
    seen: set[int] = set()
    found: Counter[str] = Counter()
    nodes: list[Any] = [loss.grad_fn]
    known = {loss.grad_fn}
    while nodes:
        node = nodes.pop()
        values = list(getattr(node, "saved_tensors", ())) if hasattr(node, "saved_tensors") else []
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                values += list(value) if isinstance(value, tuple | list) else [value]
        for value in values:
            if isinstance(value, Tensor) and value.is_cuda:
                storage = value.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[f"{node.name()} {tuple(value.shape)} {value.dtype}"] += storage.nbytes()
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)
    return found


def run(setting: Setting, *, private: bool) -> None:
    print("--- lsg" if private else "--- non-private", flush=True)
    meter = Meter()
    torch.cuda.reset_peak_memory_stats()
    model = setting.workload.make_model()
    chosen = setting.preset
    optimizer: Any = setting.optimizer(model)
    if private:
        optimizer = attach(setting, model, LSG(rank=chosen.rank, sparsity=chosen.sparsity), None)[1]
    meter("model")
    last = len(setting.workload.batches) - 1
    for number in range(3):
        epoch = optimizer.clock.enter_epoch() if private else None
        for i, (x, y) in enumerate(setting.workload.batches):
            if private:
                optimizer.clock.begin_micro_batch(epoch, size=len(x), last=i == last)
            with setting.autocast():
                loss = setting.workload.loss(model, x, y)
            meter(f"{number}.{i} forward")
            if number == 2 and i == last:
                found = saved_by_node(loss)
                print(f"  saved: {sum(found.values()) / GIB:.2f} GiB")
                for name, size in found.most_common(24):
                    print(f"    {size / 2**20:9.1f} MiB {name}")
            loss.backward()
            meter(f"{number}.{i} backward")
            if private or i == last:
                optimizer.step()
                optimizer.zero_grad()
            meter(f"{number}.{i} step")
        del loss


def main(precision: str = "bf16", name: str = "encoder") -> None:
    device = torch.device("cuda")
    chosen = preset(name).scaled(micro_batches=2)
    setting = Setting(chosen, workload(chosen, device), device, precision)
    print(torch.__version__, torch.cuda.get_device_name(), precision, chosen, flush=True)
    for private in (False, True):
        run(setting, private=private)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
