"""What every file on disk needs: written whole or not at all, strict JSON, plain numbers."""
