"""Which records enter a step, and where its random numbers come from."""
