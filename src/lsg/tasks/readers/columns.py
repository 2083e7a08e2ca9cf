"""Which columns of a table are the text, its pair, the label and the person: as named by the user, or guessed."""

from dataclasses import dataclass

from lsg.errors import ConfigurationError
from lsg.files.foreign_text import listed

PAIRS = (
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("premise", "hypothesis"),
    ("question", "sentence"),
    ("question", "answer"),
    ("query", "passage"),
)
TEXTS = (
    "text",
    "sentence",
    "content",
    "review",
    "document",
    "comment",
    "message",
    "body",
    "question",
    "query",
    "title",
)
LABELS = ("label", "labels", "gold_label", "is_duplicate", "class", "category", "target", "sentiment")


@dataclass(frozen=True)
class Columns:
    """The columns of one table. person: of the ids of those whom its rows are of, where the user named one."""

    text: str
    pair: str | None
    label: str
    person: str | None = None

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.label, self.person) if name is not None]


@dataclass(frozen=True)
class WantedColumns:
    """Columns to look for. None is guessed; but a text that is named without a pair has none, and persons are never
    guessed."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    person: str | None = None

    @property
    def named(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.label, self.person) if name is not None]

    def among(self, existing: list[str], source: str) -> Columns:
        """`existing` are the columns of `source`, a file or a hub split."""
        for name in self.named:
            if name not in existing:
                raise ConfigurationError(f"{source}: no column '{name}'; it has {listed(existing)}")
            if self.named.count(name) > 1:
                raise ConfigurationError(f"{source}: column '{name}' is named twice, for text, pair, label and person")
        free = {name.lower(): name for name in existing if name not in self.named}
        label = self.label or _first(LABELS, free)
        text, pair = self.text, self.pair
        if text is None and pair is None:
            text, pair = next(((free[a], free[b]) for a, b in PAIRS if a in free and b in free), (None, None))
        text = text or _first((*TEXTS, *(first for first, _ in PAIRS)), free)
        if text is None or label is None:
            what = "text" if text is None else "label"
            raise ConfigurationError(
                f"{source}: no column looks like a {what}; name one with --{what}-column; it has {listed(existing)}"
            )
        return Columns(text, pair, label, self.person)


def _first(candidates: tuple[str, ...], existing: dict[str, str]) -> str | None:
    return next((existing[name] for name in candidates if name in existing), None)
