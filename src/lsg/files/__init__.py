"""What is written to disk, and how: whole files, strict JSON, plain numbers."""
