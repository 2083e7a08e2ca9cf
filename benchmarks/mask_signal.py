"""How much signal do LSG's masks keep, and does that beat the noise they save? Measured on real per-sample gradients.

    python benchmarks/mask_signal.py MODEL_FOLDER SST2_FOLDER OUTPUT.json [--tuned-on RECORDS]

For a pretrained encoder with a new head, and again after some non-private fine-tuning: per-sample factor gradients of
RGP (rank 8) on training sentences, with half of the units masked in several ways. "kept" is the share of the squared
gradient of projected weights that a mask keeps. "signal-to-noise" is the length of the mean clipped gradient over the
length of the noise on it, relative to no mask (RGP): above 1 the mask pays in this sense. "alignment" is the cosine
between the mean clipped gradient and the mean gradient that is neither clipped nor masked.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lsg import LSG, RGP, PrivacyEngine
from lsg.tasks.catalog import load_task
from lsg.tasks.encoded import as_loader, encode_texts
from lsg.tasks.models import load_text_model, load_tokenizer, select_trained
from lsg.train.provenance import provenance

RANK, SPARSITY, MICRO_BATCH = 8, 0.5, 32
HEAD_SCALE = 0.1  # on the last layer's gradients before clipping, as RGP does: they would hide all others
Masks = dict[str, tuple[Tensor, Tensor]]  # parameter -> rows of L, columns of R that are trained


def engine_for(model: nn.Module, method: Any, loader: Any) -> PrivacyEngine:
    engine = PrivacyEngine(accountant="rdp")
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        data_loader=loader,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        method=method,
        noise_generator=torch.Generator().manual_seed(0),
    )
    return engine


def masks_of(model: nn.Module, loader: Any, importance: str) -> Masks:
    engine = engine_for(model, LSG(rank=RANK, sparsity=SPARSITY, importance=importance), loader)
    masks = {name: (space.left_mask.clone(), space.right_mask.clone()) for name, space in engine.subspaces.items()}
    engine.detach()
    return masks


def gradients(model: nn.Module, loader: Any, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Per-sample gradients of all batches, by parameter: (dL, dR) or dense."""
    engine = engine_for(model, RGP(rank=RANK), loader)
    found: dict[str, list[Any]] = {}
    for batch in batches:
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
        F.cross_entropy(logits, batch["labels"]).backward()
        for name, gradient in engine.per_sample_gradients().items():
            found.setdefault(name, []).append(gradient)
        engine._optimizer.zero_grad()  # type: ignore[union-attr]
    engine.detach()
    return {
        name: tuple(torch.cat(parts) for parts in zip(*list_, strict=True))
        if isinstance(list_[0], tuple)
        else torch.cat(list_) * HEAD_SCALE
        for name, list_ in found.items()
    }


def measure(per_sample: dict[str, Any], masks: dict[str, Masks]) -> dict[str, Any]:
    plain = _vectors(per_sample, None)
    mean = plain.mean(0)
    norms = plain.norm(dim=1)
    thresholds = {"always clipped": 0.01 * float(norms.median()), "median": float(norms.median()), "never clipped": 1e9}
    report: dict[str, Any] = {"median norm": float(norms.median()), "dimensions": plain.shape[1], "masks": {}}
    base = {label: _clipped_mean(plain, c) for label, c in thresholds.items()}
    for kind, mask in {"none (RGP)": None, **masks}.items():
        vectors = plain if mask is None else _vectors(per_sample, mask)
        projected = {name: gradient for name, gradient in per_sample.items() if isinstance(gradient, tuple)}
        shares = _vectors(projected, mask).square().sum(1) / _vectors(projected, None).square().sum(1)
        row: dict[str, Any] = {"kept": float(shares.mean())}
        for label, c in thresholds.items():
            signal = _clipped_mean(vectors, c)
            saved = math.sqrt(plain.shape[1] / vectors.shape[1])
            # Zeros where masked, to compare with the whole gradient.
            whole = _clipped_mean(_vectors(per_sample, mask, keep_zeros=True), c) if mask is not None else signal
            row[label] = {
                "signal-to-noise": float(signal.norm() / base[label].norm() * saved),
                "alignment": float(F.cosine_similarity(whole, mean, dim=0)),
            }
        report["masks"][kind] = row
    report["kept by layer kind"] = _by_kind(per_sample, masks)
    return report


def _vectors(per_sample: dict[str, Any], masks: Masks | None, *, keep_zeros: bool = False) -> Tensor:
    parts = []
    for name, gradient in per_sample.items():
        if not isinstance(gradient, tuple):
            parts.append(gradient.flatten(1))
            continue
        left, right = gradient
        if masks is not None:
            rows, columns = masks[name]
            if keep_zeros:
                left, right = left * rows[:, None], right * columns
            else:
                left, right = left[:, rows], right[:, :, columns]
        parts += [left.flatten(1), right.flatten(1)]
    return torch.cat(parts, dim=1)


def _clipped_mean(vectors: Tensor, threshold: float) -> Tensor:
    return (vectors * (threshold / vectors.norm(dim=1, keepdim=True)).clamp(max=1.0)).mean(0)


def _by_kind(per_sample: dict[str, Any], masks: dict[str, Masks]) -> dict[str, Any]:
    """Share of the squared gradient that the paper's mask keeps, for L and R, averaged over layers of a kind."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for name, gradient in per_sample.items():
        if isinstance(gradient, tuple):
            rows, columns = masks["weight (LSG)"][name]
            left, right = (g.square().sum(0) for g in gradient)
            kind = ".".join(part for part in name.split(".")[-4:-1] if not part.isdigit())
            kinds.setdefault(kind, []).append(
                (float(left[rows].sum() / left.sum()), float(right[:, columns].sum() / right.sum()))
            )
    return {kind: {"L": sum(a for a, _ in v) / len(v), "R": sum(b for _, b in v) / len(v)} for kind, v in kinds.items()}


def inverted(masks: Masks) -> Masks:
    return {name: (~rows, ~columns) for name, (rows, columns) in masks.items()}


def fine_tune(model: nn.Module, data: Any, records: int) -> float:
    """Plain AdamW on the first `records` sentences, one epoch; returns the last losses' mean."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    losses = []
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))[:records]
    for indices in order.split(32):
        batch = data.__getitems__(indices)
        loss = F.cross_entropy(model(**{k: v for k, v in batch.items() if k != "labels"}).logits, batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("output", type=Path)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tuned-on", type=int, default=3200)
    options = parser.parse_args()
    torch.manual_seed(0)
    records = load_task("sst2", options.data).train
    tokenizer = load_tokenizer(options.model)
    data = encode_texts(records, tokenizer, 64, torch.device("cpu"))
    model, _ = load_text_model(options.model, ("0", "1"))
    select_trained(model, "paper")
    model.eval()  # no dropout: the same gradients for every mask
    loader = as_loader(data, 256)
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: options.samples]
    batches = [data.__getitems__(part) for part in chosen.split(MICRO_BATCH)]
    stages: dict[str, Any] = {}
    for stage in ("new head", "fine-tuned"):
        if stage == "fine-tuned":
            loss = fine_tune(model, data, options.tuned_on)
            stage = f"fine-tuned on {options.tuned_on} sentences, loss {loss:.2f}"
        weight = masks_of(model, loader, "weight")
        masks = {
            "weight (LSG)": weight,
            "weight inverted": inverted(weight),
            "random": masks_of(model, loader, "random"),
            "factor": masks_of(model, loader, "factor"),
        }
        stages[stage] = measure(gradients(model, loader, batches), masks)
        print(stage, json.dumps(stages[stage], indent=1), flush=True)
    document = {"provenance": provenance(), "model": Path(options.model).name, "stages": stages}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
