"""The learning rate over a run: set at every logical step, those without samples included."""

from torch.optim.lr_scheduler import LambdaLR

from lsg.step.optimizer import PrivateOptimizer

DROPS = (0.3, 0.6, 0.8)  # of all steps: where "steps" divides by DIVISOR (RGP's CIFAR-10 code)
DIVISOR = 5


def share(schedule: str, step: int, steps: int, warmup: float = 0.0) -> float:
    """Of the configured learning rate, at this step (from 0) of so many.

    warmup: the rate rises in that share of the steps. It begins above 0, as every step costs privacy, and the schedule
    runs over the steps that are left.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    step, steps = step - rising, steps - rising
    if schedule == "linear":
        return max(0.0, 1 - step / steps)
    if schedule == "steps":
        return 1 / DIVISOR ** sum(step >= drop * steps for drop in DROPS)
    return 1.0


def attach_lr_schedule(optimizer: PrivateOptimizer, schedule: str, steps: int, warmup: float = 0.0) -> LambdaLR:
    """Sets the optimizer's learning rate from now on. The scheduler is returned for its state."""
    scheduler = LambdaLR(optimizer.original_optimizer, lambda step: share(schedule, step, steps, warmup))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return scheduler
