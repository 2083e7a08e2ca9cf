"""A model's forward, compiled or recorded as CUDA graphs; what stands in the way of either."""
