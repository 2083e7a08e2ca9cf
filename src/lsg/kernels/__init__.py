"""Tensors in, tensors out: every Triton kernel, and its reference in PyTorch's operations."""
