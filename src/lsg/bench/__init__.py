"""Side-by-side timings: the same model, batch and precision, with and without privacy, interleaved in one process."""
