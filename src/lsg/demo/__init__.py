"""What `lsg demo` compares: runs on digits, steps of a wide network, and what follows from both, in words."""
