"""Where a result came from: nothing in, a plain dictionary out that goes beside the numbers."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from lsg.files.foreign_text import visible

# Besides torch, what decides epsilon (opacus and dp-accounting) and the arithmetic.
_PACKAGES = ("torch", "numpy", "opacus", "dp-accounting", "scikit-learn")


def provenance() -> dict[str, Any]:
    """Command line, time, versions, commit (None outside a git checkout) and hardware."""
    from lsg import __version__

    return {
        "command": visible(shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]), 10_000),
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "lsg": __version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        **_commit(),
        "hardware": _hardware(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """The commit of lsg's own source, and whether the source differs from it.

    A package installed inside somebody else's checkout is not tracked there, and must not report that project's commit.
    """
    source = Path(__file__).parents[1]  # src/lsg
    if _git(source, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "modified": None}
    changes = _git(source, "status", "--porcelain", "--", ".")
    return {"commit": _git(source, "rev-parse", "HEAD"), "modified": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _hardware() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    import torch  # `lsg --help` need not wait for it

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": _cpu_model(), "cores": usable, "torch_threads": torch.get_num_threads(), "gpus": gpus}


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
