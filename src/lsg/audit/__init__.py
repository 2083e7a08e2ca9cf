"""Empirical privacy: attacks on the engine as it runs, whose success bounds its true epsilon from below."""
