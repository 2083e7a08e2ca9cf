"""A model that is wrapped for several processes in, the model itself out; the wrapper keeps out of the way.

`DistributedDataParallel` sums whole gradients, and copies buffers in each forward, at which all ranks must meet.
Private training sums factors once a logical step, and ranks may have different numbers of micro-batches.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lsg.errors import ConfigurationError


def unwrapped(model: Any) -> Any:
    """The model inside of a `DistributedDataParallel`, anything else as it is."""
    if isinstance(model, DataParallel) or type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigurationError(
            f"module is wrapped in {type(model).__name__}: give lsg the model itself, one process a GPU (torchrun), or "
            "shard it by torch.distributed.fsdp.fully_shard"
        )
    return model.module if isinstance(model, DistributedDataParallel) else model


def keep_out(model: Any) -> None:
    """Have the wrapper call its model and do nothing else, until `let_in`."""
    if isinstance(model, DistributedDataParallel):
        inner = model.module
        model.__dict__["forward"] = lambda *args, **kwargs: inner(*args, **kwargs)


def let_in(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        model.__dict__.pop("forward", None)
