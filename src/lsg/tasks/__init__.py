"""Data sets and models by name. How they are trained is the subject of `lsg.train`."""
