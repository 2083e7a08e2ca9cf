"""A tensor that is sharded over the ranks (FSDP2's parameters): which part of it is this rank's, and tensors like it.

Every function takes tensors that are not sharded, too: all of such a tensor is this rank's own.
"""

import sys
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_T = TypeVar("_T", bound=Tensor)


def is_sharded(tensor: object) -> TypeGuard["DTensor"]:
    """Whoever has such a tensor has loaded its class, which takes a second that others need not wait."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def own(tensor: Tensor) -> Tensor:
    """This rank's rows, cut off from autograd. They are the tensor's own memory, not a copy."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local.detach()


def own_rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor, along its first dimension, are this rank's."""
    if not is_sharded(tensor):
        return slice(0, tensor.shape[0])
    rows, mesh = tensor.shape[0], tensor.device_mesh
    each = -(-rows // mesh.size())
    start = min(rows, mesh.get_local_rank() * each)
    return slice(start, min(rows, start + each))


def sharded_like(tensor: _T, rows: Tensor) -> Tensor:
    """The tensor of `tensor`'s shape and placements of which `rows` are this rank's own."""
    if not is_sharded(tensor):
        return rows
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def gradient_of(parameter: Tensor, rows: Tensor) -> Tensor:
    """A gradient of this rank's rows as the parameter's `.grad`: where that is, and in its own precision and memory
    layout (channels last, say), which fused optimizers insist on."""
    mine = own(parameter)
    if (rows.dtype, rows.stride(), rows.device) != (mine.dtype, mine.stride(), mine.device):
        rows = torch.empty_like(mine).copy_(rows)
    return sharded_like(parameter, rows)


def compute_device(tensor: Tensor) -> torch.device:
    """Where a parameter is computed with: FSDP2's CPUOffloadPolicy keeps it elsewhere."""
    if is_sharded(tensor) and tensor.device_mesh.device_type != tensor.device.type:
        kind = tensor.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return tensor.device


def bytes_each(tensor: Tensor) -> int:
    """The memory of a tensor on a rank, on average: the same number on all ranks."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // tensor.device_mesh.size()) if is_sharded(tensor) else size
