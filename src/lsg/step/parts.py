"""An optimizer in; out whether it may step on a part of the parameters at a time.

Lifted gradients are as large as the weights, and a step needs each of them only while it updates that one weight.
Torch's optimizers skip a parameter without a gradient, and those below update each parameter by itself. So one part of
the parameters gets gradients, the optimizer steps, the gradients go, and the next part follows: the result is the same
to the bit, and the gradients never exist together.
"""

from collections.abc import Sequence

from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lsg.distributed.sharding import bytes_each

PART_BYTES = 256 * 2**20  # gradients of a part: it ends with the parameter that reaches this size
_ALL_AT_ONCE_BYTES = 2**30  # smaller gradients exist together and stay in `.grad`, where users look for them

_ONE_BY_ONE = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.RMSprop, optim.Rprop),
)


def steps_in_parts(optimizer: optim.Optimizer, trained: Sequence[Tensor]) -> bool:
    """Whether these gradients are large enough for parts, and the optimizer gives the same result in parts.

    A subclass, a step hook or a replaced `step` may look at several parameters, and so gets all gradients in one step.
    A scheduler's replacement of `step` does not count: it only notes that it was called.
    """
    size = sum(bytes_each(parameter) for parameter in trained)
    hooks = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    )
    replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return size > _ALL_AT_ONCE_BYTES and type(optimizer) in _ONE_BY_ONE and not any(hooks) and not replaced
