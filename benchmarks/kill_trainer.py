"""Kills a PrivateTrainer's run at random moments, resumes it each time, and compares it with one that nobody killed.

    python benchmarks/kill_trainer.py --kills 20 --output results/kills/trainer.json

Children are forked, so that none of them has to import anything. Checkpoints are written after every step, so that many
kills come while one is being written.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.trainer_runs import trainer, weights

from lsg.errors import ConfigurationError


def run(folder: Path, kind: str) -> None:
    """Train to the end, from the last whole checkpoint if there is one, and write down what came out."""
    own = trainer(folder / "run", kind, args={"save_strategy": "steps", "save_steps": 1})
    try:
        own.train(resume_from_checkpoint=True)
    except ConfigurationError as refusal:
        if "no checkpoint of a private run" not in str(refusal):
            raise
        own.train()
    found = {
        "weights": hashlib.sha256(weights(own.model).numpy().tobytes()).hexdigest(),
        "epsilon": own.get_epsilon(),
        "steps": own.state.global_step,
    }
    (folder / "result.json").write_text(json.dumps(found))


def child(folder: Path, kind: str) -> int:
    """Forks a process that runs."""
    number = os.fork()
    if number == 0:
        code = 1
        with contextlib.suppress(Exception), open(folder / "log.txt", "a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            run(folder, kind)
            code = 0
        os._exit(code)
    return number


def kill_and_resume(folder: Path, kind: str, kills: int, seconds: float, chance: random.Random) -> dict[str, Any]:
    """seconds: what a whole run takes. Returns at which steps it was killed, and what came out in the end."""
    at: list[int] = []
    failures = 0
    while True:
        number, wait = child(folder, kind), chance.uniform(0.02, seconds / 3)
        if len(at) < kills:
            time.sleep(wait)
            os.kill(number, signal.SIGKILL)
        status = os.waitpid(number, 0)[1]
        if os.WIFSIGNALED(status):
            steps = [int(f.name.rpartition("-")[2]) for f in (folder / "run").glob("checkpoint-*")]
            at.append(max(steps, default=0))
        elif os.WEXITSTATUS(status):
            failures += 1
            if failures > 3:
                raise RuntimeError((folder / "log.txt").read_text()[-2000:])
        elif len(at) < kills:  # it was faster: from the start, in the same books
            (folder / "result.json").unlink()
            for checkpoint in (folder / "run").glob("checkpoint-*"):
                for file in checkpoint.iterdir():
                    file.unlink()
                checkpoint.rmdir()
        else:
            result: dict[str, Any] = json.loads((folder / "result.json").read_text())
            return {"killed_after_steps": at, "failed_resumes": failures} | result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=["class", "causal"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(argv)
    rows, same = {}, True
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "whole").mkdir()
            began = time.perf_counter()
            os.waitpid(child(folder / "whole", kind), 0)
            seconds = time.perf_counter() - began
            whole = json.loads((folder / "whole" / "result.json").read_text())
            (folder / "killed").mkdir()
            found = kill_and_resume(folder / "killed", kind, given.kills, seconds, random.Random(given.seed))
        equal = all(found[key] == whole[key] for key in whole)
        same &= equal and not found["failed_resumes"]
        rows[kind] = {"equal": equal, "whole": whole, "killed": found}
        print(f"{kind}: {len(found['killed_after_steps'])} kills, equal: {equal}, epsilon {found['epsilon']:.4f}")
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
