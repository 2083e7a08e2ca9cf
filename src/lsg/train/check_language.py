"""Settings of a run in, a refusal out where they are for language models and its task is not, or the reverse."""

from lsg.errors import ConfigurationError
from lsg.train.config import RunConfig, option

_OWN = ("lora", "merge", "prompt_column", "sample_prompt")
_NO_HEAD = {"pooling": "model", "head_lr": 1.0, "head_scale": 1.0}


def check_language_options(config: RunConfig) -> None:
    if config.kind != "generate":
        given = [name for name in _OWN if getattr(config, name) is not None]
        if given:
            raise ConfigurationError(f"{option(given[0])} is for --task generate, and not for {config.task}")
        return
    for name, usual in _NO_HEAD.items():
        if getattr(config, name) != usual:
            raise ConfigurationError(
                f"{option(name)} {getattr(config, name)}: a language model has no new head; leave it out"
            )
    if config.trainable == "head":
        raise ConfigurationError(
            "--trainable head: a language model has no new head; train its matrices (paper), vectors (bias), all of "
            "it, or adapters (--lora)"
        )
    if config.lora is not None and config.trainable != "paper":
        raise ConfigurationError(
            f"--trainable {config.trainable}: with --lora {config.lora} adapters alone are trained; leave one of the "
            "two out"
        )
    if config.merge and config.lora is None:
        raise ConfigurationError("--merge adds adapters to the weights: it needs --lora")
