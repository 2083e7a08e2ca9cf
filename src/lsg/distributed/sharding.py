"""A tensor that is sharded over the ranks (FSDP2's parameters): which part of it is this rank's, and tensors like it.

Every function takes tensors that are not sharded, too: all of such a tensor is this rank's own.
"""

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if dist.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of PyTorch without torch.distributed has no sharded tensors

    class DTensor:  # type: ignore[no-redef]
        pass


_T = TypeVar("_T", bound=Tensor)


def is_sharded(tensor: object) -> bool:
    return isinstance(tensor, DTensor)


def own(tensor: Tensor) -> Tensor:
    """This rank's rows, cut off from autograd. They are the tensor's own memory, not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local.detach()


def own_rows(tensor: Tensor) -> slice:
    """Which rows of the whole tensor, along its first dimension, are this rank's."""
    if not isinstance(tensor, DTensor):
        return slice(0, tensor.shape[0])
    rows, mesh = tensor.shape[0], tensor.device_mesh
    each = -(-rows // mesh.size())
    start = min(rows, mesh.get_local_rank() * each)
    return slice(start, min(rows, start + each))


def sharded_like(tensor: _T, rows: Tensor) -> Tensor:
    """The tensor of `tensor`'s shape and placements of which `rows` are this rank's own."""
    if not isinstance(tensor, DTensor):
        return rows
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
    if isinstance(tensor, DTensor) and tensor.device_mesh.device_type != tensor.device.type:
        kind = tensor.device_mesh.device_type
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return tensor.device


def bytes_each(tensor: Tensor) -> int:
    """The memory of a tensor on a rank, on average: the same number on all ranks."""
    size = tensor.numel() * tensor.element_size()
    return -(-size // tensor.device_mesh.size()) if isinstance(tensor, DTensor) else size
