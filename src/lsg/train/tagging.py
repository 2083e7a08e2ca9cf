"""How a model that tags words is trained and scored: as a classifier, with an answer for each word of a record."""

from torch import Tensor, nn

from lsg.losses import per_sequence
from lsg.tasks.encoded import Batch, Encoded
from lsg.tasks.encoded_tags import EncodedTags
from lsg.train.evaluation import Classifier
from lsg.train.run_warnings import OneAnswer


class Tagger(Classifier):
    """The first token of a word has its answer. Words that are cut off, or have no token, have no right one."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over records of each one's mean over its own words."""
        return per_sequence(*self.logits(model, batch))

    def answers(self, data: Encoded) -> int:
        return int(_tags(data).words.sum())

    def one_answer(self, parts: dict[str, Encoded]) -> dict[str, OneAnswer]:
        """Its error counts records, not words: those of one text are seldom independent."""
        found = {}
        for name, part in parts.items():
            data = _tags(part)
            labels = data.labels.cpu()
            hits = (labels == labels[labels >= 0].mode().values).sum(1).double()
            words = data.words.double()
            share = float(hits.sum() / words.sum())
            error = float((hits - share * words).square().sum().sqrt() / words.sum())
            found[name] = OneAnswer(share, len(data), error)
        return found


def _tags(data: Encoded) -> EncodedTags:
    assert isinstance(data, EncodedTags)
    return data
