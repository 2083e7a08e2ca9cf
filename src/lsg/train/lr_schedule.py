"""The learning rate over a run: set at every logical step, those without samples included."""

from torch.optim.lr_scheduler import LambdaLR

from lsg.step.optimizer import PrivateOptimizer

DROPS = (0.3, 0.6, 0.8)  # of all steps: where "steps" divides by DIVISOR (RGP's CIFAR-10 code)
DIVISOR = 5


def share(schedule: str, step: int, steps: int) -> float:
    """Of the initial learning rate, at this step (from 0) of so many."""
    if schedule == "linear":
        return max(0.0, 1 - step / steps)
    if schedule == "steps":
        return 1 / DIVISOR ** sum(step >= drop * steps for drop in DROPS)
    return 1.0


def attach_lr_schedule(optimizer: PrivateOptimizer, schedule: str, steps: int) -> LambdaLR:
    """Sets the optimizer's learning rate from now on. The scheduler is returned for its state."""
    scheduler = LambdaLR(optimizer.original_optimizer, lambda step: share(schedule, step, steps))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return scheduler
