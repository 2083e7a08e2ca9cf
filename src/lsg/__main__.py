"""The installed command `lsg`, and `python -m lsg`: one line for users who have only the library."""

import sys

from lsg.extras import MissingExtraError, needs_extra


def main() -> None:
    try:
        with needs_extra("train", "the command line"):
            from lsg.cli import run
    except MissingExtraError as missing:
        print(f"lsg: {missing}", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
