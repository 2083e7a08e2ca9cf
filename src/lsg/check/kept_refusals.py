"""What a model keeps beyond a forward, refused where it was computed from records."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lsg.check.kept_state import put_back
from lsg.check.ownership import alike
from lsg.check.recording import Recording
from lsg.check.records import FewRecords
from lsg.check.trial_runs import TrialRuns
from lsg.errors import PrivacyError
from lsg.layers.fallback import fallback_forward
from lsg.layers.patched_module import PatchedModule


def refuse_kept_apart(
    model: nn.Module, modules: Sequence[tuple[nn.Module, PatchedModule]], kept: dict[str, Any]
) -> None:
    """What a module computes sample by sample is of no use outside of it."""
    paths = {id(module): path for path, module in model.named_modules()}
    apart = [paths.get(id(module), "") for module, patched in modules if patched.rule is fallback_forward]
    for name, value in kept.items():
        owner = name.rpartition(".")[0]
        inside = any(not path or owner == path or owner.startswith(path + ".") for path in apart)
        if isinstance(value, Tensor) and inside:
            raise PrivacyError(
                f"module '{owner or type(model).__name__}' keeps a tensor that it computes, '{name}', and "
                "runs sample by sample, as it uses parameters of its own: return the tensor, or freeze those"
            )


def refuse_kept(runs: TrialRuns, kept: dict[str, Any], now: dict[str, Any], few: FewRecords) -> None:
    """A model must not keep what it computed from records: a buffer is published with the weights, and whatever is
    read at the next batch ties records to each other."""
    published = {name for name, _ in (*runs.model.named_buffers(), *runs.model.named_parameters())}
    for name in sorted(kept.keys() & now.keys(), key=lambda name: name not in published):
        a, b = kept[name], now[name]
        same = alike(a, b) if isinstance(a, Tensor) else a == b
        if not same and (name in published or _remembers(runs, few)):
            raise PrivacyError(
                f"the model keeps '{name}', computed from the records of a batch, beyond it: a state_dict "
                "publishes buffers without noise, and what is read at the next batch ties records to each other. "
                "Keep no statistics of data in a forward (lsg.fix(model) turns off those of norm layers)"
            )


def _remembers(runs: TrialRuns, few: FewRecords) -> bool:
    """Whether a forward is another one after other records."""
    found = []
    for changed in ((), (0,)):
        with put_back(runs.model):
            runs.batch.watch = recording = Recording()
            try:
                runs.run(few.batch(changed))
                recording = runs.batch.watch = Recording()
                recording.finish(runs.run(few.batch()))
            finally:
                runs.batch.watch = None
        found.append(recording.places)
    first, second = ([place.trail.value for place in places] for places in found)
    return len(first) != len(second) or any(not alike(a, b) for a, b in zip(first, second, strict=True))
