"""Anyone's texts to learn to write, with or without prompts: what `lsg.tasks.readers.text` takes, without labels."""

from dataclasses import replace

from lsg.files.foreign_text import visible
from lsg.tasks.data import TaskData
from lsg.tasks.readers.columns import WantedDocument
from lsg.tasks.readers.parts import read_parts
from lsg.tasks.readers.records import documents_of
from lsg.tasks.split import hold_out


def read_documents(data: str, wanted: WantedDocument) -> TaskData:
    found = read_parts(data, wanted)
    training, columns = documents_of(found.training), found.training.columns
    if found.evaluation is None:
        held = hold_out(training, (), found.source)
    else:
        held = TaskData(training, {found.part: documents_of(found.evaluation)}, (), found.source)
    prompts = "" if columns.prompt is None else f" after prompts of '{visible(columns.prompt, 80)}'"
    return replace(held, columns=f"texts of the column '{visible(columns.text, 80)}'{prompts}")
