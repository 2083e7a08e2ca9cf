"""`lsg tune`: a configuration and settings to vary in, the best settings out, and what finding them has cost."""
