"""How long commands take to begin, over `python -c "import torch"` in the same run, and which imports cost most.

python benchmarks/startup.py [--rounds 7]      # writes results/bench/startup.json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from lsg.train.provenance import provenance

OUTPUT = Path(__file__).parents[1] / "results" / "bench" / "startup.json"
PYTHON = [sys.executable]
COMMANDS = {
    "import torch": [*PYTHON, "-c", "import torch"],
    "import lsg": [*PYTHON, "-c", "import lsg"],
    "from lsg import *": [*PYTHON, "-c", "from lsg import *"],
    "lsg --help": [*PYTHON, "-m", "lsg", "--help"],
    "lsg train --help": [*PYTHON, "-m", "lsg", "train", "--help"],
    "lsg train --no-such-option": [*PYTHON, "-m", "lsg", "train", "--no-such-option"],
    "lsg budget": [*PYTHON, "-m", "lsg", "budget", "--task", "digits", "--epsilon", "3", "--epochs", "5"],
}
FIRST_LINE = "lsg train, first line on a terminal"
LIMITS = {  # seconds, but for "from lsg import *": seconds over `import torch`
    "lsg --help": 0.6,
    "lsg train --no-such-option": 0.6,
    "lsg budget": 2.5,
    "from lsg import *": 0.4,
    FIRST_LINE: 1.0,
}


def seconds(command: list[str]) -> tuple[float, float]:
    """By the clock, and of a processor: of the two, the second is the same on a machine with other work."""
    began, before = time.perf_counter(), os.times()
    subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, used


def seconds_to_first_line() -> float:
    """Of `lsg train`, which loads PyTorch and data before it has anything to tell."""
    ours, theirs = os.openpty()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [*PYTHON, "-m", "lsg", "train", "--task", "digits", "--epsilon", "3", "--output", f"{folder}/run"]
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        os.read(ours, 1)
        taken = time.perf_counter() - began
        process.kill()
        process.wait()
        os.close(ours)
    return taken


def costliest_imports(code: str, count: int = 12) -> list[dict[str, object]]:
    """Modules by the time that they take themselves, without those that they import."""
    told = subprocess.run([*PYTHON, "-X", "importtime", "-c", code], capture_output=True, text=True).stderr
    lines = re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", told)
    most = sorted(((int(own), name) for own, name in lines), reverse=True)[:count]
    return [{"module": name, "milliseconds": own / 1000} for own, name in most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {name: [] for name in (*COMMANDS, FIRST_LINE)}
    worked: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):  # in turn, so that a busy moment meets all of them
        for name, command in COMMANDS.items():
            taken, used = seconds(command)
            found[name].append(taken)
            worked[name].append(used)
        found[FIRST_LINE].append(seconds_to_first_line())
    torch = median(found["import torch"])
    rows = {
        name: {"seconds": median(times), "least": min(times), "over import torch": median(times) / torch}
        for name, times in found.items()
    }
    for name, times in worked.items():
        rows[name]["processor seconds"] = median(times)
    for name, row in rows.items():
        reached = row["seconds"] - (torch if name == "from lsg import *" else 0)
        told = f", limit {LIMITS[name]} s: {'met' if reached <= LIMITS[name] else 'missed'}" if name in LIMITS else ""
        print(f"{name:36} {row['seconds']:.2f} s, {row['over import torch']:.2f} of import torch{told}")
    for name, times in worked.items():
        over = median(times) - median(worked["import torch"])
        print(f"{name:36} {median(times):.2f} s of a processor, {over:+.2f} s over import torch")
    document = {
        "provenance": provenance(),
        "load": os.getloadavg(),
        "rounds": rounds,
        "commands": rows,
        "imports": {code: costliest_imports(code) for code in ("from lsg import *", "import lsg.cli")},
    }
    OUTPUT.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
