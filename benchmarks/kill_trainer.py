"""Kills a PrivateTrainer's run at random moments, resumes it each time, and compares it with one that nobody killed.

    python benchmarks/kill_trainer.py --kills 20 --output results/kills/trainer.json

Children are forked, so that none of them has to import anything. Checkpoints are written after every step. A child is
killed at a random moment after a random number of further steps: before its first one, within one, or while a
checkpoint is being written.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.sft_runs import sft
from tests.support.trainer_runs import trainer, weights

from lsg.errors import ConfigurationError
from lsg.train.provenance import provenance

KINDS = ("class", "causal", "sft")
STEPS_BETWEEN_KILLS = 3  # at most
SECONDS_OF_A_STEP = 0.15  # about, its checkpoint included


def run(folder: Path, kind: str) -> None:
    """Train to the end, from the last whole checkpoint if there is one, and write down what came out."""
    saving = {"save_strategy": "steps", "save_steps": 1}
    own = sft(folder / "run", **saving) if kind == "sft" else trainer(folder / "run", kind, args=saving)
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


def steps_taken(folder: Path) -> int:
    """By the newest checkpoint, whole or not."""
    return max((int(f.name.rpartition("-")[2]) for f in (folder / "run").glob("checkpoint-*")), default=0)


def kill_later(number: int, folder: Path, chance: random.Random) -> None:
    """Kills the child a random while after it has taken a random number of further steps, unless it ends before."""
    wanted = steps_taken(folder) + chance.randint(0, STEPS_BETWEEN_KILLS)
    while steps_taken(folder) < wanted and os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.005)
    time.sleep(chance.uniform(0, SECONDS_OF_A_STEP))
    os.kill(number, signal.SIGKILL)  # one that has ended, and is not waited for yet, hears nothing


def kill_and_resume(folder: Path, kind: str, kills: int, chance: random.Random) -> dict[str, Any]:
    """Returns at which steps it was killed, and what came out in the end."""
    at: list[int] = []
    failures = 0
    while True:
        number = child(folder, kind)
        if len(at) < kills:
            kill_later(number, folder, chance)
        status = os.waitpid(number, 0)[1]
        if os.WIFSIGNALED(status):
            at.append(steps_taken(folder))
        elif os.WEXITSTATUS(status):
            failures += 1
            if failures > 3:
                raise RuntimeError((folder / "log.txt").read_text()[-2000:])
        elif len(at) < kills:  # it came to its end: from the start
            (folder / "result.json").unlink()
            shutil.rmtree(folder / "run")
        else:
            result: dict[str, Any] = json.loads((folder / "result.json").read_text())
            return {"killed_after_steps": at, "failed_resumes": failures} | result


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(argv)
    origin, same = provenance(), True
    rows: dict[str, Any] = {}
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "whole").mkdir()
            os.waitpid(child(folder / "whole", kind), 0)
            whole = json.loads((folder / "whole" / "result.json").read_text())
            (folder / "killed").mkdir()
            found = kill_and_resume(folder / "killed", kind, given.kills, random.Random(given.seed))
        equal = all(found[key] == whole[key] for key in whole)
        same &= equal and not found["failed_resumes"]
        rows[kind] = {"equal": equal, "whole": whole, "killed": found}
        print(f"{kind}: {len(found['killed_after_steps'])} kills, equal: {equal}, epsilon {found['epsilon']:.4f}")
    if given.output:
        given.output.write_text(json.dumps({"seed": given.seed, **rows, "provenance": origin}, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
