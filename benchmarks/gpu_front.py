"""The bench behind README's figure: `lsg bench --preset encoder`, and compiled non-private training at its best.

    python benchmarks/gpu_front.py OUTPUT

Compiled as it is, transformers makes an attention mask that masks nothing, which costs non-private training a fifth of
its speed. lsg keeps transformers from making it. One more contender gets the same help, so that the comparison is fair.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsg.bench.contenders import Setting, Step, contenders, non_private
from lsg.speed.transformers_masks import without_needless_masks

ONLY = (
    "non-private,non-private compiled,non-private compiled without mask,lsg,lsg graphs,lsg compiled graphs,"
    "opacus hooks,opacus ghost"
)


def with_one_more(setting: Setting) -> dict[str, Callable[[], Step]]:
    def without_mask() -> Step:
        step = non_private(setting, compiled=True)

        def lean_step() -> None:
            with without_needless_masks():
                step()

        return lean_step

    return contenders(setting) | {"non-private compiled without mask": without_mask}


if __name__ == "__main__":
    command: Any = importlib.import_module("lsg.cli.bench")
    command.contenders = with_one_more
    inspect.unwrap(command.bench)(
        name="encoder", precision="bf16", device="cuda", rounds=20, only=ONLY, sweep="", output=Path(sys.argv[1])
    )
