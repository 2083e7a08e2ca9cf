"""Words with tags: a configuration, and records that are encoded, in; refusals of what cannot be trained on out."""

from lsg.errors import ConfigurationError
from lsg.tasks.encoded import Encoded
from lsg.tasks.encoded_tags import EncodedTags
from lsg.train.config import RunConfig


def check_tagging_options(config: RunConfig) -> None:
    if config.kind == "tokens" and config.pooling != "model":
        raise ConfigurationError(
            f"--pooling {config.pooling}: --task tokens has an answer for each word, and nothing to pool; leave it out"
        )


def check_words(config: RunConfig, source: str, parts: dict[str, Encoded]) -> None:
    """Refuse words of which no single one has a token."""
    for name, part in parts.items():
        if isinstance(part, EncodedTags) and not part.seen:
            raise ConfigurationError(
                f"{source}: of its part '{name}' the tokenizer of --model {config.model} makes no token within "
                f"--max-length {config.max_length}"
            )
