"""Data sets with their models: what is trained, apart from how."""
