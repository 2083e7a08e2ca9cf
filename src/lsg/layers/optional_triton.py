"""Triton where it is installed. A CPU build of PyTorch comes without: AVAILABLE is False."""

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None
    AVAILABLE = False
else:
    AVAILABLE = True

__all__ = ["AVAILABLE", "tl", "triton"]
