"""`lsg train`: a configuration in, a run's folder out."""
