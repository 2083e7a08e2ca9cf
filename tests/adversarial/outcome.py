"""What a trial came to, and a short reason for each of lsg's refusals."""

import re
from dataclasses import dataclass

# Leading part of lsg's message -> a short reason for reports. The first match counts.
_REASONS = [
    (r"influence each other", "samples mix"),
    (r"computes something else", "another function sample by sample"),
    (r"first dimension must be the sample", "not batch first"),
    (r"cannot be trained privately", "refused by type"),
    (r"used outside its module", "weight used outside its module"),
    (r"while gradients of \d+ samples wait", "another size while gradients wait"),
    (r"forward of another number of samples", "gradients of a forward lost"),
    (r"batch-first indices before", "indices changed their layout"),
    (r"one for each, or positions", "indices or positions"),
    (r"in another way than before", "another use than before"),
    (r"in a way that has no rule", "no rule for this use"),
    (r"looks up with", "batch-dependent lookup"),
    (r"the loader handed out", "not as many samples as records"),
    (r"changed in place", "changed in place"),
]


@dataclass(frozen=True)
class Outcome:
    """kind: "refused" (an error of lsg), "right" (as the oracle computes it), "silent" (wrong, without an error),
    "crash" (another error, where the plain model runs) or "invalid" (the plain model does not run: no verdict)."""

    kind: str
    reason: str = ""
    detail: str = ""
    clean: bool = True  # whether records are independent of each other in the plain model, whatever lsg says
    warned: bool = False  # whether lsg warned of something on the way

    @property
    def acceptable(self) -> bool:
        return self.kind in ("refused", "right", "invalid")


def short_reason(message: str) -> str:
    """A class of messages: by the table, else by the leading words without names and numbers."""
    for pattern, reason in _REASONS:
        if re.search(pattern, message):
            return reason
    words = re.sub(r"'[^']*'|\([^)]*\)|\d+", "", message).split()
    return " ".join(words[:7])
