"""Subspaces: which parameters are projected, onto what, and the way back. They see weights, never data."""

from lsg.subspace.space import Subspace

__all__ = ["Subspace"]
