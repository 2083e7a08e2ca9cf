"""Anyone's texts to learn to write, with or without prompts: what `lsg.tasks.readers.text` takes, without labels."""

from lsg.tasks.data import TaskData
from lsg.tasks.readers.columns import WantedDocument
from lsg.tasks.readers.parts import read_parts
from lsg.tasks.readers.records import documents_of
from lsg.tasks.split import hold_out


def read_documents(data: str, wanted: WantedDocument) -> TaskData:
    found = read_parts(data, wanted)
    training = documents_of(found.training)
    if found.evaluation is None:
        return hold_out(training, (), found.source)
    return TaskData(training, {found.part: documents_of(found.evaluation)}, (), found.source)
