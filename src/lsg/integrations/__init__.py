"""Other people's loops: each file or folder knows one library, and imports it when it is asked for."""
