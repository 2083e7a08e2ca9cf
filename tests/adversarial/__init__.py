"""The permanent adversary: models that try to break the guarantee without lsg noticing. Read README.md first."""
