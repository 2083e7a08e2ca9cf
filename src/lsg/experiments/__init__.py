"""The paper's evaluation: one run from its configuration, grids of runs, the tables and figures made of them."""
