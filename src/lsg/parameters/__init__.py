"""The state of one trained parameter: its subspace, its carriers, its per-sample gradients."""
