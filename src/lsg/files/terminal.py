"""The terminal: texts of any origin in, characters that only show them out. Everything that a command prints is here.

Texts are never taken for rich's markup: a label or a path may hold square brackets.
"""

import sys
from typing import Any

from lsg.extras import needs_extra
from lsg.files.foreign_text import visible, visible_lines, write_line
from lsg.files.sign_of_life import spoken

with needs_extra("train", "the command line"):
    from rich.console import Console
    from rich.progress import ProgressColumn, Task
    from rich.text import Text


class Terminal(Console):
    """A console that shows texts as they are, harmful characters by number, and each printed text on one line.

    `lines` prints texts of our own that have several. Texts in tables may have several, too.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @property
    def shows_bars(self) -> bool:
        """Whether rich draws on it: not where it is a file, nor where it cannot move its cursor."""
        return self.is_terminal and not self.is_dumb_terminal

    def print(self, *objects: Any, **options: Any) -> None:
        spoken()
        super().print(*(Text(visible(part)) if isinstance(part, str) else part for part in objects), **options)

    def lines(self, text: str, style: str = "") -> None:
        spoken()
        super().print(Text(visible_lines(text)), style=style, soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible_lines(text), **(options | {"markup": False, "emoji": False}))


class Words(ProgressColumn):
    """A column of a progress bar: words with the task's own in them, as in `str.format`, with `task`."""

    def __init__(self, words: str, style: str = "") -> None:
        super().__init__()
        self._words, self._style = words, style

    def render(self, task: Task) -> Text:
        return Text(visible_lines(self._words.format(task=task)), style=self._style)


def echo(text: str, *, err: bool = False) -> None:
    """A line to stdout, or to stderr, without any width or style."""
    spoken()
    write_line(visible_lines(text), sys.stderr if err else sys.stdout)
