"""Many runs in one process on a leased GPU: cells in, a results store out, ended before the lease does.

    python benchmarks/gpu_cells.py CELLS.jsonl STORE SECONDS RECORDS

Each line of CELLS.jsonl is {"name": folder in STORE, ...fields of RunConfig}; the fields that it leaves out are the
preset's. RECORDS: of the whole training set. A cell is started only if it would still fit at the pace of the last one
of its model, method and masks, or of the slowest so far. Of each cell its result.json alone is kept; for results/, fold
them into one file: `python -m lsg.reproduce.records STORE`.
"""

import gc
import json
import shutil
import sys
import time
import traceback
from pathlib import Path

import torch

import lsg.train.run as runs
from lsg.train import checkpoints as checkpoint_times
from lsg.train.config import RunConfig
from lsg.train.folder import RunFolder
from lsg.train.presets import preset


class Lease:
    """Runs cells as long as there is time for them. checkpoints: a cell that is cut off goes on in the next call."""

    def __init__(self, store: Path, seconds: float, records: int, *, checkpoints: bool = False) -> None:
        self.store, self._limit, self._records, self._start = store, seconds, records, time.perf_counter()
        # Seconds a sample (a view of one, with --views), of the last cell of each model, method and masks.
        self._pace: dict[tuple[str, str, str], float] = {}
        if not checkpoints:
            checkpoint_times.SECONDS_BETWEEN = float("inf")

    def run(self, name: str, config: RunConfig) -> runs.RunResult | None:
        """The cell's result: an earlier one, or a new one; None without time for it, or where it failed."""
        folder = self.store / name
        file, samples = folder / "result.json", config.epochs * config.views * (config.train_limit or 1) * self._records
        if file.exists():
            earlier = runs.RunResult.from_dict(json.loads(file.read_text()), str(file))
            if earlier.config == config:
                return earlier
        began, kind = time.perf_counter(), (config.model, config.method, config.importance)
        pace = self._pace.get(kind, max(self._pace.values(), default=0.0))
        if began - self._start + pace * samples > self._limit:
            print(f"no time left for {name}", flush=True)
            return None
        resume = RunFolder(folder).checkpoint.exists()
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)  # cut off, or of other settings
        try:
            result = runs.run(config, folder, resume=resume)
        except Exception:  # the other cells go on
            print(f"{name} failed", flush=True)
            traceback.print_exc()
            return None
        finally:
            _keep_result_alone(folder)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        took = time.perf_counter() - began
        self._pace[kind] = took / samples
        curve = " ".join(f"{100 * score:.1f}" for score in result.curve)
        print(
            f"[{time.perf_counter() - self._start:.0f} s] {name}: {100 * result.score:.2f} % at epsilon "
            f"{result.epsilon}, {result.seconds:.1f} s of training in {took:.1f} s, "
            f"{result.history[-1]['samples_per_second']:.0f} samples/s at the end; {curve}",
            flush=True,
        )
        return result


def _keep_result_alone(folder: Path) -> None:
    for path in folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "result.json":
            path.unlink()


def main(cells: Path, store: Path, seconds: float, records: int) -> None:
    lease = Lease(store, seconds, records)
    for line in cells.read_text().splitlines():
        fields = json.loads(line)
        name = fields.pop("name")
        lease.run(name, RunConfig(**{**preset(fields["task"], fields["method"]), **fields}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
