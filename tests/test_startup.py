"""What is loaded for nothing: the command line answers without PyTorch, the library without a compiler."""

import subprocess
import sys

import pytest

import lsg

HEAVY = ("torch", "scipy", "matplotlib", "transformers", "sklearn", "opacus", "dp_accounting")


def loaded(code: str, *names: str) -> list[str]:
    """Which of these modules a new process has after the code."""
    ask = f"{code}\nimport sys; print([name for name in {names!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    found: list[str] = eval(shown.stdout.splitlines()[-1])
    return found


def test_the_command_line_is_there_without_pytorch() -> None:
    assert loaded("import lsg.cli", *HEAVY) == []


DIGITS = ["--output", "out", "--task", "digits", "--epsilon"]
USAGE = [
    ["train", "--output", "out"],  # no task
    ["train", *DIGITS, "nan"],
    ["train", *DIGITS, "3", "--epochs", "1000000000"],
    ["train", *DIGITS, "3", "--config", "there-is-none.toml"],
    ["train", *DIGITS, "3", "--output", "/dev/null/x"],
    ["bench", "--precision", "x"],
    ["audit", "--mode", "x"],
]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["train", "--bogus"], ["nonsense"], *USAGE])
def test_help_and_errors_of_usage_load_no_pytorch(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['lsg', *{words!r}]\nfrom lsg.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    assert loaded(code, *HEAVY) == []


def test_the_library_loads_no_compiler() -> None:
    code = "from lsg import *"
    unneeded = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "scipy.stats")
    assert loaded(code, *unneeded, "opacus", "matplotlib", "transformers") == []


def test_names_that_are_files_too_stay_functions() -> None:
    code = "import lsg.explain, lsg.fix, lsg\nassert callable(lsg.explain) and callable(lsg.fix), lsg.explain"
    assert loaded(code) == []
    assert set(lsg.__all__) <= set(dir(lsg)) and all(getattr(lsg, name) is not None for name in lsg.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lsg.nothing  # noqa: B018
