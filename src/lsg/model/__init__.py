"""Attached to a model from `make_private` to `detach`: what records its gradients and what watches it."""
