"""What the autograd functions of all layers share."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from lsg.errors import PrivacyError


def fixed_signature(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep an autograd function's signature at hand: PyTorch asks for it at each call, at a layer's cost."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward


def refuse_double_backward() -> None:
    """Rules give first derivatives only; in a backward pass gradients are on only where a second one is asked for."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise PrivacyError("backward(create_graph=True): per-sample rules have no second derivatives")
