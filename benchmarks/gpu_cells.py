"""Many runs in one process on a leased GPU: cells in, a results store out, ended before the lease does.

    python benchmarks/gpu_cells.py CELLS.jsonl STORE SECONDS

Each line of CELLS.jsonl is {"name": folder in STORE, ...fields of RunConfig}; the fields that it leaves out are the
preset's. A cell is started only if the longest one so far would still fit. Model weights, checkpoints and logs are not
kept.
"""

import gc
import json
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch

import lsg.experiments.run as runs
from lsg.experiments.config import RunConfig
from lsg.experiments.presets import preset


def main(cells: Path, store: Path, limit: float) -> None:
    start, longest = time.perf_counter(), 0.0
    runs._CHECKPOINT_SECONDS = float("inf")
    for line in cells.read_text().splitlines():
        fields = json.loads(line)
        name = fields.pop("name")
        if (store / name / "result.json").exists():
            continue
        if time.perf_counter() - start + longest > limit:
            print(f"no time left for {name}", flush=True)
            continue
        began = time.perf_counter()
        try:
            config = RunConfig(**{**preset(fields["task"], fields["method"]), **fields})
            result = runs.run(config, store / name)
        except Exception:  # the other cells go on
            print(f"{name} failed", flush=True)
            traceback.print_exc()
            continue
        finally:
            for kind in ("model", "tensorboard", "checkpoint"):
                shutil.rmtree(store / name / kind, ignore_errors=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        longest = max(longest, time.perf_counter() - began)
        curve = " ".join(f"{100 * score:.1f}" for score in result.curve)
        print(
            f"[{time.perf_counter() - start:.0f} s] {name}: {100 * result.score:.2f} % at epsilon {result.epsilon}, "
            f"{result.seconds:.1f} s of training, {result.history[-1]['samples_per_second']:.0f} samples/s at the end; "
            f"{curve}",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
