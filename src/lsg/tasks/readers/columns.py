"""Which columns of a table are the text or words, a pair or prompt, the label or tags, and the person: as named, or
guessed."""

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
PROMPTED = (  # a prompt, and the completion that is to be learnt
    ("prompt", "completion"),
    ("prompt", "response"),
    ("prompt", "text"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("source", "target"),
    ("article", "highlights"),
    ("document", "summary"),
    ("dialogue", "summary"),
)
COMPLETIONS = tuple(dict.fromkeys(completion for _, completion in PROMPTED))
WORDS, TAGS = ("tokens", "words"), ("tags", "ner_tags", "labels", "label")
LABELS = ("label", "labels", "gold_label", "is_duplicate", "class", "category", "target", "sentiment")


@dataclass(frozen=True)
class Columns:
    """The columns of one table. pair: of the second text of a pair; prompt: of what stands before a text.

    label: None where records have none. person: of the ids of those whom its rows are of, where the user named one.
    are_lists: a record has a list of words in `text`, and one of tags in `label`.
    """

    text: str
    pair: str | None = None
    prompt: str | None = None
    label: str | None = None
    person: str | None = None
    are_lists: bool = False

    @property
    def texts(self) -> list[str]:
        return _given(self.text, self.pair, self.prompt)

    @property
    def names(self) -> list[str]:
        return [*self.texts, *_given(self.label, self.person)]


@dataclass(frozen=True)
class NamedColumns:
    """What the user named, by option. Which of them a task has is the catalog's affair."""

    text: str | None = None
    pair: str | None = None
    prompt: str | None = None
    label: str | None = None
    unit: str | None = None

    def refuse(self, task: str, *others: str) -> None:
        """Of a task that has no such columns."""
        for name in others:
            if getattr(self, name) is not None:
                raise ConfigurationError(f"--{name}-column {getattr(self, name)}: --task {task} has no such column")


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
        return _given(self.text, self.pair, self.label, self.person)

    def among(self, existing: list[str], source: str) -> Columns:
        """`existing` are the columns of `source`, a file or a hub split."""
        free = _not_named(self.named, existing, source, "text, pair, label and person")
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
        return Columns(text, pair=pair, label=label, person=self.person)

    def again(self, found: Columns) -> "WantedColumns":
        """The same columns, of evaluation data; whose records those are does not matter."""
        return WantedColumns(found.text, found.pair, found.label)


@dataclass(frozen=True)
class WantedDocument:
    """Columns of documents to look for, guessed as in `WantedColumns`. Without a prompt the whole text is learnt."""

    text: str | None = None
    prompt: str | None = None
    person: str | None = None

    def among(self, existing: list[str], source: str) -> Columns:
        named = _given(self.text, self.prompt, self.person)
        free = _not_named(named, existing, source, "prompt, text and person")
        text, prompt = self.text, self.prompt
        if text is None and prompt is None:
            pairs = ((free[a], free[b]) for a, b in PROMPTED if a in free and b in free)
            prompt, text = next(pairs, (None, None))
        text = text or _first(TEXTS if prompt is None else (*COMPLETIONS, *TEXTS), free)
        if text is None:
            raise ConfigurationError(
                f"{source}: no column looks like a text; name one with --text-column; it has {listed(existing)}"
            )
        return Columns(text, prompt=prompt, person=self.person)

    def again(self, found: Columns) -> "WantedDocument":
        """As of `WantedColumns`."""
        return WantedDocument(found.text, found.prompt)


@dataclass(frozen=True)
class WantedTags:
    """Columns of words and their tags to look for, each guessed where it is None."""

    text: str | None = None
    label: str | None = None
    person: str | None = None

    def among(self, existing: list[str], source: str) -> Columns:
        free = _not_named(_given(self.text, self.label, self.person), existing, source, "words, tags and person")
        text, label = self.text or _first(WORDS, free), self.label or _first(TAGS, free)
        if text is None or label is None:
            what, option = ("words", "text") if text is None else ("tags", "label")
            raise ConfigurationError(
                f"{source}: no column looks like lists of {what}; name one with --{option}-column; it has "
                f"{listed(existing)}"
            )
        return Columns(text, label=label, person=self.person, are_lists=True)

    def again(self, found: Columns) -> "WantedTags":
        """As of `WantedColumns`."""
        return WantedTags(found.text, found.label)


Wanted = WantedColumns | WantedDocument | WantedTags


def _given(*names: str | None) -> list[str]:
    return [name for name in names if name is not None]


def _not_named(named: list[str], existing: list[str], source: str, uses: str) -> dict[str, str]:
    """Columns that can be guessed, by names in lower case. Those that are named must be there, each for one use."""
    for name in named:
        if name not in existing:
            raise ConfigurationError(f"{source}: no column '{name}'; it has {listed(existing)}")
        if named.count(name) > 1:
            raise ConfigurationError(f"{source}: column '{name}' is named twice, for {uses}")
    return {name.lower(): name for name in existing if name not in named}


def _first(candidates: tuple[str, ...], existing: dict[str, str]) -> str | None:
    return next((existing[name] for name in candidates if name in existing), None)
