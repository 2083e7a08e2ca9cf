"""Measured speeds of one GPU in, speeds of every model and method out; what is not measured says so in its source."""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scale_shapes import MODELS, Shapes, shapes

BENCH = Path(__file__).parents[1] / "results" / "bench"
# Tokens a second of one H200 (torch 2.11, eager, 8 x 16 sequences of 512 tokens a step), measured outside of this
# repository: no file here has them.
OUTSIDE = {"plain": 10.7e3, "lsg": 12.5e3}


@dataclass(frozen=True)
class Speed:
    """records: a second, on one GPU, in steps of the preset's size. source: where that comes from. peak: bytes."""

    records: float
    source: str
    peak: float | None = None


def speeds() -> dict[str, dict[str, Speed]]:
    """Model -> method -> speed."""
    encoder = _measured(BENCH / "encoder-bf16-cuda.json")
    file = BENCH / "llama-8b-bf16-cuda.json"
    small = _measured(file) if file.exists() else _told()
    slower = encoder["opacus"].records / encoder["plain"].records
    assumed = Speed(small["plain"].records * slower, "assumed: as slow beside non-private as the encoder's")
    small.setdefault("opacus", assumed)
    of_small, of_large = shapes(MODELS["llama-8b"]), shapes(MODELS["llama-70b"])
    large = {}
    for method, speed in small.items():
        ratio = multiplications(of_small, method) / multiplications(of_large, method)
        large[method] = Speed(speed.records * ratio, f"8B's by multiplications; {speed.source}")
    return {"encoder": encoder, "llama-8b": small, "llama-70b": large}


def multiplications(shape: Shapes, method: str) -> float:
    """Of a token: a weight's forward, again where checkpointed, its input's gradient and, but for lsg, its own."""
    again = int(shape.preset.checkpointing)
    weights = (2 + again + (method != "lsg")) * shape.projected
    thin = 2 * shape.preset.rank * (shape.rows + shape.columns) if method == "lsg" else 0
    attention = 2 * shape.preset.layers * shape.preset.tokens * shape.preset.width  # scores, and what they weigh
    return weights + thin + (3 + again) * attention


def _told() -> dict[str, Speed]:
    tokens, told = MODELS["llama-8b"].tokens, "tokens/s measured outside of this repository"
    return {method: Speed(speed / tokens, told) for method, speed in OUTSIDE.items()}


def _measured(file: Path) -> dict[str, Speed]:
    """The fastest of each method. Of Opacus, the mode with per-sample gradients of full size."""
    timings = [t for t in json.loads(file.read_text())["points"][0]["timings"] if t["error"] is None]
    found: dict[str, Speed] = {}
    for method, prefix in (("plain", "non-private"), ("lsg", "lsg"), ("opacus", "opacus hooks")):
        named = [t for t in timings if t["name"].startswith(prefix)]
        if named:
            best = min(named, key=lambda t: median(t["seconds"]))
            source = f"{file.name}: {best['name']}"
            found[method] = Speed(best["samples"] / median(best["seconds"]), source, best["peak_bytes"])
    return found
