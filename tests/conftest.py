"""What holds for all tests."""

import signal

# A shell's background jobs ignore SIGINT, and so would all commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
