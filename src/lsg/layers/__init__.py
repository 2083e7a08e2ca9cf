"""Rules: how each family of layers leaves per-sample gradients, and which parameter gets which treatment."""
