"""The installed command `lsg`, and `python -m lsg`: one line for users who have only the library."""

from lsg.files.sign_of_life import tell_waits
from lsg.files.stop_signals import end_at_once


def main() -> None:
    end_at_once()  # before all other imports
    from lsg.distributed.launch import writes
    from lsg.extras import MissingExtraError, needs_extra
    from lsg.files.foreign_text import say

    if writes():
        tell_waits(say)
    try:
        with needs_extra("train", "the command line"):
            from lsg.cli import run
    except MissingExtraError as missing:
        say(f"lsg: {missing}")
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
