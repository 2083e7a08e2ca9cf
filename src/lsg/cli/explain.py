"""`lsg explain`: a model by name in, what each method would do to its parameters and its noise out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lsg.errors import ConfigurationError
from lsg.files.terminal import Terminal
from lsg.methods import PRIVATE_METHODS
from lsg.report.settings import method_text
from lsg.tasks.names import ZOO_NAMES
from lsg.train.config import RunConfig

if TYPE_CHECKING:
    from torch import nn

    from lsg.explain import Explanation

MOST, MOST_CLASSES = 100_000, 10_000_000_000  # sizes beyond these overflow in PyTorch


def explain(
    model: Annotated[str, typer.Option(help=f"A hub id or folder of a text model, or {', '.join(ZOO_NAMES)}.")],
    methods: Annotated[str, typer.Option(help="Comma-separated; the first is the one of --details.")] = (
        ",".join(PRIVATE_METHODS)
    ),
    rank: Annotated[int, typer.Option(help="r of lsg and rgp.")] = RunConfig.rank,
    sparsity: Annotated[float, typer.Option(help="p of lsg and sparse-dpsgd.")] = RunConfig.sparsity,
    trainable: Annotated[str, typer.Option(help="paper, all or head, as for lsg train.")] = RunConfig.trainable,
    batch_size: Annotated[int, typer.Option(help="Of the step whose signal-to-noise is shown.")] = (
        RunConfig.batch_size
    ),
    noise_multiplier: Annotated[float, typer.Option(help="Of that step; see lsg budget.")] = 1.0,
    classes: Annotated[int, typer.Option(min=1, max=MOST_CLASSES, help="Labels of the task.")] = 2,
    channels: Annotated[int, typer.Option(min=1, max=MOST, help="Of the images, for a zoo model.")] = 3,
    image_size: Annotated[int, typer.Option(min=1, max=MOST, help="Side of the images, for a zoo model.")] = 32,
    details: Annotated[bool, typer.Option("--details", help="Also list every parameter.")] = False,
) -> None:
    """Show what would be projected, dense and frozen in a model, and how much noise each method adds.

    Needs the model's configuration alone, no weights."""
    if not noise_multiplier > 0:
        raise ConfigurationError(f"--noise-multiplier {noise_multiplier:g} must be above 0")
    configs = [
        RunConfig(
            task="any",
            model=model,
            method=name,
            rank=rank,
            sparsity=sparsity,
            trainable=trainable,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
        )
        for name in _chosen(methods)
    ]
    from lsg.explain import explain as explain_model  # with PyTorch, for which help and errors of usage need not wait
    from lsg.tasks.models import select_trained

    network = _untrained(model, classes, channels, image_size)
    select_trained(network, trainable)
    explanations = [explain_model(network, config.make_method()) for config in configs]
    console = Terminal()
    if details:
        console.lines(str(explanations[0]))
    console.print(_table(configs, network, explanations))


def _chosen(names: str) -> list[str]:
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in wanted:
        if name not in PRIVATE_METHODS:
            raise ConfigurationError(f"--methods: '{name}' is not one of {', '.join(PRIVATE_METHODS)}")
    if not wanted:
        raise ConfigurationError(f"--methods: none given; choose from {', '.join(PRIVATE_METHODS)}")
    return wanted


def _untrained(name: str, classes: int, channels: int, image_size: int) -> nn.Module:
    """Of that shape; its weights are random, as nothing here depends on them."""
    from lsg.tasks.models import ImageShape, load_image_model, text_config
    from lsg.tasks.quiet_transformers import quiet_transformers

    if name in ZOO_NAMES:
        return load_image_model(name, ImageShape(classes, channels, image_size, image_size))
    with quiet_transformers():
        from transformers import AutoModelForSequenceClassification

        config = text_config(name)
        config.num_labels = classes
        network: nn.Module = AutoModelForSequenceClassification.from_config(config)
    return network


def _table(configs: list[RunConfig], model: nn.Module, explanations: list[Explanation]) -> Table:
    first = configs[0]
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    table = Table(
        title=f"{first.model}: {parameters:,} parameters, {trained:,} trained (--trainable {first.trainable})",
        caption=f"signal to noise: length of the summed gradients of {first.batch_size:,} samples that all agree, over "
        f"that of the noise, at noise multiplier {first.noise_multiplier:g}",
    )
    table.add_column("")
    for config in configs:
        table.add_column(method_text(config.to_dict()), justify="right")
    scale = first.batch_size / (first.noise_multiplier or 1.0)
    fewer = [e.dimensions_before / max(1, e.dimensions_after) for e in explanations]
    for kind in ("projected", "dense", "frozen"):
        table.add_row(kind, *(f"{e.count(kind):,}" for e in explanations))
    table.add_section()
    table.add_row("noise dimensions", *(f"{e.dimensions_after:,}" for e in explanations))
    table.add_row("DPSGD has", *(f"{ratio:.1f}x" for ratio in fewer))
    table.add_row("bytes a sample", *(f"{e.bytes_per_sample:,}" for e in explanations))
    table.add_row("signal to noise", *(f"{scale * e.signal_to_noise:.3g}" for e in explanations))
    table.add_row("over DPSGD's", *(f"{ratio**0.5:.1f}x" for ratio in fewer))
    return table
