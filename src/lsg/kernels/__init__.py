"""Tensors in, tensors out: every Triton kernel, and the plain computation that it replaces."""
