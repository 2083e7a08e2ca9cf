"""BatchNorms that do not mix samples: in evaluation mode one is a fixed scale and shift, from the statistics it has.

`model.train()` in a training loop puts them into training mode, where they normalise by the batch and write its
statistics into buffers that are published with the model. So each is watched, and refused by name when that happens.
"""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from lsg.errors import PrivacyError


def has_statistics(norm: _BatchNorm) -> bool:
    """Whether it has what it takes to normalise without looking at the batch."""
    return norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None


def watch_batch_norms(model: nn.Module) -> list[RemovableHandle]:
    """From now on, until the handles are removed, a BatchNorm in training mode raises PrivacyError when it runs."""
    return [
        module.register_forward_pre_hook(_RefuseTraining(name))
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
    ]


class _RefuseTraining:
    """A hook. On a copy of the model it does nothing."""

    def __init__(self, name: str | None) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any) -> None:
        # Without gradients, too: running statistics of private data would be published with the model.
        if self._name is not None and (module.training or not has_statistics(module)):  # type: ignore[arg-type]
            raise PrivacyError(
                f"module '{self._name}' ({type(module).__name__}) runs in training mode, where it mixes the samples of "
                "a batch and keeps statistics of them: call its eval() after model.train(), or use lsg.fix(model)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RefuseTraining":
        return _RefuseTraining(None)

    def __reduce__(self) -> Any:
        return _RefuseTraining, (None,)
