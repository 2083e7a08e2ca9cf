"""Who calls a step on a batch that the private loader did not hand out: a loop that knows lsg's optimizer alone."""

import sys
from types import FrameType

from lsg.errors import PrivacyError

# Module of a loop -> its name, and what to use in its place.
_LOOPS = {
    "transformers.trainer": (
        "transformers' Trainer",
        "lsg.integrations.transformers.PrivateTrainer(..., privacy=PrivacyArguments(...))",
    ),
    "lightning.pytorch.loops": ("Lightning", "the loader that make_private returned, with lsg.integrations.lightning"),
    "pytorch_lightning.loops": ("Lightning", "the loader that make_private returned, with lsg.integrations.lightning"),
}


def refuse_foreign_loop() -> None:
    """Raise PrivacyError in a step that such a loop takes on batches of its own sampler."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for start, (name, instead) in _LOOPS.items():
            if module.startswith(start):
                raise PrivacyError(
                    f"{name} trains on batches that its own sampler drew, not on the Poisson samples of the loader "
                    "that make_private returned: each step would cost as much as one on all records. "
                    f"Use {instead}"
                )
        frame = frame.f_back
