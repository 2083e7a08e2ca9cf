"""An optimizer in; out whether its step may be taken a part of the parameters at a time, and in parts of which size.

Lifted gradients are as large as the weights, and a step needs each of them only while it updates that one weight.
Torch's optimizers leave a parameter without a gradient as it is, and those below look at no other parameter to update
one: to give gradients to a part of the parameters, step, take them away and go on with the next part is the same step,
to the bit, and the gradients never exist together.
"""

from collections.abc import Sequence

from torch import Tensor, optim
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lsg.distributed.sharding import bytes_each

PART_BYTES = 256 * 2**20  # of gradients: a part is complete when it has as many, and is one parameter at least
_ALL_AT_ONCE_BYTES = 2**30  # up to here gradients exist together and stay in `.grad`, where users look for them

_ONE_BY_ONE = (
    *(optim.SGD, optim.ASGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.RMSprop, optim.Rprop),
)


def steps_in_parts(optimizer: optim.Optimizer, trained: Sequence[Tensor]) -> bool:
    """Whether gradients of these parameters are many enough for parts, and the optimizer is one that may have them.

    A subclass may look at anything. So may a hook, or a `step` that was replaced (but for a scheduler's, which only
    notes that it was called): where there is one, it sees one step and all gradients.
    """
    size = sum(bytes_each(parameter) for parameter in trained)
    hooks = (
        *(optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks),
        *(_global_optimizer_pre_hooks, _global_optimizer_post_hooks),
    )
    replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    return size > _ALL_AT_ONCE_BYTES and type(optimizer) in _ONE_BY_ONE and not any(hooks) and not replaced
