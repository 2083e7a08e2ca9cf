"""A model that is wrapped for several processes in, the model itself out; the wrapper keeps out of the way.

`DistributedDataParallel` sums whole gradients, and copies buffers in each forward, at which all ranks must meet.
Private training sums factors once a logical step, and ranks may have different numbers of micro-batches.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lsg.errors import ConfigurationError, PrivacyError


def unwrapped(model: Any) -> Any:
    """The model inside of a `DistributedDataParallel`, anything else as it is."""
    if isinstance(model, DataParallel) or type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigurationError(
            f"module is wrapped in {type(model).__name__}: give lsg the model itself, one process a GPU (torchrun), or "
            "shard it by torch.distributed.fsdp.fully_shard"
        )
    if not isinstance(model, DistributedDataParallel):
        return model
    ranks = model.process_group.size()
    if ranks != dist.get_world_size():
        raise ConfigurationError(
            f"module's DistributedDataParallel has a process group of {ranks} of the {dist.get_world_size()} "
            "processes, and lsg trains one model on all of them: leave process_group out, or start the processes of "
            "each model as a job of their own (torchrun)"
        )
    return model.module


def refuse_later_wrapper() -> None:
    """Called in a forward of a private model: refuse one out of a wrapper that was made after `make_private`."""
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise PrivacyError(
            "the model was wrapped in DistributedDataParallel after make_private: the wrapper would wait for gradients "
            "that never come, and copy buffers where not all ranks are. Wrap the model first and give make_private "
            "the wrapper, or leave it out: make_private sees to all processes"
        )


def keep_out(model: Any) -> None:
    """Have the wrapper call its model and do nothing else, until `let_in`."""
    if isinstance(model, DistributedDataParallel):
        inner = model.module
        model.__dict__["forward"] = lambda *args, **kwargs: inner(*args, **kwargs)


def let_in(model: nn.Module) -> None:
    if isinstance(model, DistributedDataParallel):
        model.__dict__.pop("forward", None)
