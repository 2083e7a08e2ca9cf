"""Anyone's texts to classify: one table, a table for training and one for evaluation, or a hub name, comes in."""

from lsg.tasks.data import TaskData
from lsg.tasks.readers.columns import WantedColumns
from lsg.tasks.readers.parts import read_parts
from lsg.tasks.readers.records import label_names, texts_of
from lsg.tasks.split import hold_out


def read_text_task(data: str, wanted: WantedColumns) -> TaskData:
    found = read_parts(data, wanted)
    names = label_names(found.training)
    training = texts_of(found.training, names)
    if found.evaluation is None:
        return hold_out(training, names, found.source)
    return TaskData(training, {found.part: texts_of(found.evaluation, names)}, names, found.source)
