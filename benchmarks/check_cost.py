"""What the check that samples stay apart costs: at the first batch, and at later ones.

    python benchmarks/check_cost.py first [--device cuda]       # the first micro-batch against later ones
    python benchmarks/check_cost.py later --against OLD_SRC     # later micro-batches, beside another source tree

Bars: the first batch costs at most 3 steps more (1.5 of memory), under 3 s for a MiniLM-sized model on two cores; later
batches cost at most 1 % more than before there was such a check. Writes results/adversary/check-cost-*.json.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lsg.bench.contenders import Setting, attach
from lsg.bench.presets import workload
from lsg.bench.shapes import Preset, preset
from lsg.methods import LSG
from lsg.perf import PerfConfig
from lsg.train.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "adversary"
MINILM = preset("cpu-encoder").scaled(name="minilm", layers=6, tokens=128, micro_batch=32, micro_batches=1)
EAGER = PerfConfig(compile=False)


def micro_batches(shape: Preset, device: torch.device, precision: str, count: int, perf: PerfConfig) -> dict[str, Any]:
    """Seconds, and on a GPU the most memory, of each of `count` steps of one micro-batch."""
    setting = Setting(shape, workload(shape, device), device, precision)
    model = setting.workload.make_model()
    _, optimizer = attach(setting, model, LSG(rank=8, sparsity=0.5), perf)
    on_gpu = device.type == "cuda"
    x, y = setting.workload.batches[0]
    seconds, memory = [], []
    for _ in range(count):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.clock.begin_micro_batch(optimizer.clock.enter_epoch(), size=len(x), last=True)
        with setting.autocast():
            loss = setting.workload.loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
            memory.append(torch.cuda.max_memory_allocated())
        seconds.append(time.perf_counter() - start)
    return {"shape": shape.name, "precision": precision, "seconds": seconds, "memory": memory}


def first(device: torch.device, smoke: bool) -> dict[str, Any]:
    """The first step of a model, beside the median of those after it. The process is warmed up by another model."""
    if device.type == "cuda" and not smoke:
        runs = [(preset(name).scaled(micro_batches=1), p) for name, p in (("encoder", "bf16"), ("wrn28-4", "tf32"))]
    else:
        runs = [(MINILM, "fp32"), (preset("cpu-encoder").scaled(micro_batches=1), "fp32")]
    found = []
    for shape, precision in runs:
        small = shape.scaled(micro_batch=4)
        micro_batches(small, device, precision, 2, EAGER)
        for _ in range(3):
            gc.collect()
            one = micro_batches(shape, device, precision, 3 if smoke else 8, EAGER)
            step = statistics.median(one["seconds"][2:])
            more = one["seconds"][0] - step
            one |= {"step": step, "more_seconds": more, "more_steps": more / step}
            if one["memory"]:
                one["memory_ratio"] = one["memory"][0] / max(one["memory"][2:])
            print({key: one[key] for key in one if key not in ("seconds", "memory")}, flush=True)
            found.append(one)
    return {"runs": found}


def later(against: str, rounds: int) -> dict[str, Any]:
    """Two source trees at the same time, a core each, which they exchange: what else the machine does meets both."""
    trees = {"old": against, "new": str(Path(__file__).parents[1] / "src")}
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    for number in range(rounds):
        running = {name: _started(tree, core ^ number % 2) for core, (name, tree) in enumerate(trees.items())}
        for name, process in running.items():
            found[name].append(json.loads(process.communicate()[0].splitlines()[-1]))
            print(number, name, statistics.median(found[name][-1]), min(found[name][-1]), flush=True)
    middle = {name: statistics.mean(statistics.median(one) for one in runs) for name, runs in found.items()}
    least = {name: statistics.mean(min(one) for one in runs) for name, runs in found.items()}
    pairs = zip(found["new"], found["old"], strict=True)
    more = [statistics.median(new) / statistics.median(old) - 1 for new, old in pairs]
    return {
        "median_seconds": middle,
        "least_seconds": least,
        "more_by_median": statistics.mean(more),
        "standard_error": statistics.stdev(more) / len(more) ** 0.5,
        "more_by_least": least["new"] / least["old"] - 1,
        "runs": found,
    }


def _started(tree: str, core: int) -> subprocess.Popen[str]:
    """`later_batches.py` with this source tree, in one thread on one core."""
    path = os.pathsep.join([tree, os.environ.get("PYTHONPATH", "")])
    command = ["taskset", "-c", str(core), sys.executable, str(Path(__file__).with_name("later_batches.py"))]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["first", "later"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--against", help="the `src` folder of another commit's work tree")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    found = first(device, asked.smoke) if asked.what == "first" else later(asked.against, asked.rounds)
    found = {"command": " ".join(sys.argv), "provenance": provenance() | {"load": os.getloadavg()}, **found}
    asked.output.mkdir(parents=True, exist_ok=True)
    file = asked.output / f"check-cost-{asked.what}-{asked.device}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    print({key: value for key, value in found.items() if key not in ("runs", "provenance")})


if __name__ == "__main__":
    main()
