"""Presets and results/ in, the generated parts of README and docs pages out, and README's figure.

python docs/render.py            writes every part and the figure anew
python docs/render.py --check    writes nothing; fails if a part is not what it would write
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import default_tables
import email_tables
import front_figure
import head_tables
from scipy.stats import spearmanr

from lsg.accounting.rdp import curve_epsilon
from lsg.accounting.selection import DRAWS, Repeats, calibrate_score_noise, gaussian_curve
from lsg.methods import METHODS
from lsg.tasks.catalog import TASKS
from lsg.train.config import RunConfig
from lsg.train.presets import preset

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "results" / "reproduce" / "cpu-minutes"
GPU_RESULTS = DOCS.parent / "results" / "reproduce" / "gpu-hour"
AUDITS = DOCS.parent / "results" / "audit"
CLIP_STUDY = DOCS.parent / "results" / "analysis" / "clip-study-digits.json"
MASK_SIGNAL = DOCS.parent / "results" / "analysis" / "mask-signal-minilm-sst2.json"
SURROGATES = DOCS.parent / "results" / "tune" / "surrogates-digits.json"
RECIPES = DOCS.parent / "results" / "recipes" / "sst2.jsonl"
WHAT_HELPS = DOCS.parent / "results" / "what-helps" / "cells.jsonl"
ARCHITECTURES = DOCS.parent / "results" / "architectures" / "table.json"
OPACUS_GRIDS = DOCS.parent / "results" / "opacus" / "grids.json"
KINDS = ("text", "decoder", "seq2seq", "image", "audio")  # of heads of transformers' families
# What a refusal says -> in short.
REASONS = {
    "batch_first=False": "`batch_first=False`",
    "a batch without samples": "no records",
    "packed sequence": "packed sequence",
    "embedding bag": "`offsets`",
}
BENCH = DOCS.parent / "results" / "bench"
SCALE = DOCS.parent / "results" / "scale"
SHOWN_GPUS = (8, 64, 512)
BENCHES = ("cpu-encoder-fp32-cpu", "cpu-wrn-fp32-cpu")
SWEEPS = BENCH / "cpu-encoder-sweeps.jsonl"
CPU_PARTS = (
    "step",
    "forward",
    "subspaces",
    "backward",
    "gradients of inputs",
    "factor products",
    "factor products: of patches",
    "clip and sum",
    "noise and lift",
    "optimizer",
)
SWEPT = {"rank": "rank", "sparsity": "sparsity", "length": "tokens", "width": "width", "batch": "micro_batch"}
METHOD_TITLES = {name: known.title for name, known in METHODS.items()} | {"any": "any method"}
SHOWN = (
    "model",
    "optimizer",
    "lr",
    "lr_schedule",
    "max_grad_norm",
    "batch_size",
    "epochs",
    "delta",
    "rank",
    "sparsity",
)


def presets() -> str:
    """What `--method lsg` starts from, a task a row."""
    lines = [f"| task | {' | '.join(f'`{name}`' for name in SHOWN)} |", "|---" * (1 + len(SHOWN)) + "|"]
    for task in TASKS:
        usual = preset(task, RunConfig.method)
        values = [f"{usual[name]:g}" if isinstance(usual[name], float) else str(usual[name]) for name in SHOWN]
        lines.append(f"| `{task}` | {' | '.join(values)} |")
    return "\n".join(lines)


def other_methods() -> str:
    """Where a method's preset is not lsg's; tasks that agree share a row."""
    tasks: dict[tuple[str, str], list[str]] = {}
    for method in METHODS:
        for task in TASKS:
            usual, own = preset(task, RunConfig.method), preset(task, method)
            told = ", ".join(f"`{name}` {own[name]:g}" for name in own if own[name] != usual.get(name))
            if told:
                tasks.setdefault((method, told), []).append(f"`{task}`")
    rows = [f"| `{method}` | {', '.join(alike)} | {told} |" for (method, told), alike in tasks.items()]
    return "\n".join(["| method | tasks | differs in |", "|---|---|---|", *rows])


def _records(file: Path) -> list[dict]:
    """One a line, by name."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def reproduced() -> str:
    """The stored tables as they are, their headings one level down, and what they cost."""
    tables = (_demoted((RESULTS / f"{name}.md").read_text()) for name in ("table1", "table2", "negatives"))
    results = _records(RESULTS / "cells.jsonl")
    minutes = sum(result["seconds"] for result in results) / 60
    cpu = results[0]["provenance"]["hardware"]["cpu"]
    return "\n".join(
        [*tables, f"{len(results)} runs, {minutes:.1f} minutes of training in all, on one thread of a {cpu}."]
    )


def tuned() -> str:
    """Validation accuracy of each setting that was tried, after the short and the long runs; taken ones in bold."""
    taken = json.loads((GPU_RESULTS / "tuned.json").read_text())
    lines = ["| method | learning rate | clip | 5 epochs, % | 10 epochs, % |", "|---|---|---|---|---|"]
    for method in METHODS:
        scores: dict[tuple[float, float], dict[int, str]] = {}  # by clip and rate, then by epochs
        for cell in _records(GPU_RESULTS / "tuning.jsonl"):
            if cell["config"]["method"] != method:
                continue
            setting = cell["config"]["max_grad_norm"], cell["config"]["lr"]
            scores.setdefault(setting, {})[cell["config"]["epochs"]] = f"{100 * cell['score']:.1f}"
        for (clip, lr), found in sorted(scores.items()):
            last = max(found)
            if taken[method] in ({"lr": lr}, {"lr": lr, "max_grad_norm": clip}):
                found[last] = f"**{found[last]}**"
            shown = "-" if method == "non-private" else f"{clip:g}"
            lines.append(f"| {method} | {lr:g} | {shown} | {found[5]} | {found.get(10, '')} |")
    return "\n".join(lines)


def on_gpu() -> str:
    """The stored tables, and how long their runs took."""
    cells = _records(GPU_RESULTS / "cells.jsonl")
    tables = [_demoted((GPU_RESULTS / f"{name}.md").read_text()) for name in ("figure-epsilon", "negatives", "table2")]
    costs = []
    for task in dict.fromkeys(cell["config"]["task"] for cell in cells):
        low_rank = [c for c in cells if c["config"]["task"] == task and c["config"]["method"] in ("lsg", "rgp")]
        seconds = sorted(round(cell["seconds"]) for cell in low_rank)
        span = f"{seconds[0]} to {seconds[-1]}" if len(seconds) > 1 else str(seconds[0])
        methods = " or ".join(sorted({cell["config"]["method"].upper() for cell in low_rank}))
        costs.append(f"{span} s of training for {low_rank[0]['config']['epochs']} epochs of {task} with {methods}")
    gpu = cells[0]["provenance"]["hardware"]["gpus"][0]
    return "\n".join([*tables, f"{len(cells)} runs on one {gpu}: {'; '.join(costs)}."])


def cifar_curves() -> str:
    """Seed 0 of LSG and RGP beside DPSGD, which has fewer epochs."""
    cells = {
        "LSG": "cifar10-lsg-r16-p0.3-eps3.3-seed0",
        "RGP": "cifar10-rgp-r16-eps3.3-seed0",
        "DPSGD": "cifar10-dpsgd-eps3.3-seed0",
    }
    curves = {record["name"]: record["curve"] for record in _records(GPU_RESULTS / "cells.jsonl")}
    rows = {name: curves[cell] for name, cell in cells.items()}
    epochs = range(20, 201, 20)
    lines = [f"| epoch | {' | '.join(map(str, epochs))} |", "|---" * (1 + len(epochs)) + "|"]
    for name, curve in rows.items():
        scores = (f"{100 * curve[epoch - 1]:.1f}" if epoch <= len(curve) else "-" for epoch in epochs)
        lines.append(f"| {name} | {' | '.join(scores)} |")
    return "\n".join(lines)


def mask_signal() -> str:
    """What each mask keeps of the gradient, and the signal-to-noise that it leaves, relative to RGP."""
    lines = []
    for stage, found in json.loads(MASK_SIGNAL.read_text())["stages"].items():
        regimes = [name for name in next(iter(found["masks"].values())) if name != "kept"]
        lines += [f"| {stage}: mask | kept | {' | '.join(regimes)} |", "|---" * (2 + len(regimes)) + "|"]
        for mask, row in found["masks"].items():
            values = " | ".join(f"{row[name]['signal-to-noise']:.2f}" for name in regimes)
            lines.append(f"| {mask} | {100 * row['kept']:.0f} % | {values} |")
        lines.append("")
    return "\n".join(lines[:-1])


def clip_study() -> str:
    """Accuracy by clip and epsilon with LSG's masks, random ones and none; differences seed by seed."""
    rows = json.loads(CLIP_STUDY.read_text())["rows"]
    scores = {(row["epsilon"], row["clip"], row["method"]): [100 * s for s in row["scores"]] for row in rows}
    seeds = len(rows[0]["scores"])
    lines = [f"| ε | clip | RGP | LSG | random masks | LSG - RGP, {seeds} seeds |", "|---|---|---|---|---|---|"]
    for epsilon, clip in dict.fromkeys((row["epsilon"], row["clip"]) for row in rows):
        plain, masked, random = (scores[epsilon, clip, method] for method in ("rgp", "lsg", "lsg-random"))
        gains = [a - b for a, b in zip(masked, plain, strict=True)]
        error = stdev(gains) / seeds**0.5
        means = " | ".join(f"{mean(found):.1f}" for found in (plain, masked, random))
        lines.append(f"| {epsilon:g} | {clip:g} | {means} | {mean(gains):+.1f} ± {error:.1f} |")
    return "\n".join(lines)


def what_helps() -> str:
    """A table for each task: the base's accuracy and what each tool adds to it, method by method."""
    tasks: dict[str, dict[str, dict[str, dict[int, float]]]] = {}  # task, tool, method, seed: percent
    for row in _records(WHAT_HELPS):
        if not row["averaging"] or row["tool"] == "base":  # `averaged` tells of the others
            tool = f"averaging {row['averaging']:g}" if row["averaging"] else row["tool"]
            task = f"{row['task']}, ε = {row['epsilon']:g}"
            tasks.setdefault(task, {}).setdefault(tool, {})[row["method"]] = _by_seed(row)
    lines = []
    for task, tools in tasks.items():
        base = tools.pop("base")
        lines += [f"| {task} | {' | '.join(METHOD_TITLES.get(m, m) for m in base)} |", "|---" * (1 + len(base)) + "|"]
        accuracies = (f"{mean(scores.values()):.1f} ± {_error(scores.values()):.1f}" for scores in base.values())
        lines.append(f"| base | {' | '.join(accuracies)} |")
        for tool, found in tools.items():
            gains = (_gain(found[m], base[m]) if m in found else "" for m in base)
            lines.append(f"| {tool} | {' | '.join(gains)} |")
        lines.append("")
    return "\n".join(lines[:-1])


def recipe_runs() -> str:
    """The runs behind the recipe for texts, seeds together: by model, ε and records, then the best."""
    seeds: dict[tuple[str, ...], dict[int, float]] = {}
    for row in sorted(_records(RECIPES), key=_recipe_order):
        seeds.setdefault(_recipe_cells(row), {})[row["seed"]] = 100 * row["score"]
    lines = [
        "| model, ε | records | trained | head sees | method | clipping | rate (head) | batch, epochs | % (seeds) |",
        "|---" * 9 + "|",
    ]
    for cells, scores in seeds.items():
        lines.append(f"| {' | '.join(cells)} | {mean(scores.values()):.1f} ({len(scores)}) |")
    return "\n".join(lines)


def _recipe_order(row: dict) -> tuple:
    return row["model"], -row["epsilon"], -(row.get("train_limit") or 1), -row["score"]


def _recipe_cells(row: dict) -> tuple[str, ...]:
    """What a run was, as the table says it."""
    records = f"about {round(67_349 * row['train_limit'], -3):,.0f}" if row.get("train_limit") else "67,349"
    method = {"dpsgd": "DPSGD", "rgp": f"RGP({row['rank']})", "lsg": f"LSG({row['rank']}, {row['sparsity']:g})"}
    clip = row["clipping"] if row["clipping"] == "automatic" else f"flat {row['max_grad_norm']:g}"
    clip += f", head x {row['head_scale']:g}" if row["head_scale"] != 1 else ""
    rate = f"{row['lr']:g}" + (f" ({row['lr'] * row['head_lr']:g})" if row.get("head_lr", 1) != 1 else "")
    extras = ["no dropout"] if not row["dropout"] else []
    extras += [f"averaging {row['averaging']:g}"] if row.get("averaging") else []
    trained = ", ".join([row["trainable"], *extras])
    model = f"{row['model'].split('-')[1]}, {row['epsilon']:g}"
    size = f"{row['batch_size']:,}, {row['epochs']}"
    return model, records, trained, row["pooling"], method[row["method"]], clip, rate, size


def averaged() -> str:
    """What averaged weights add to the last ones of the same runs, at the last ones' best rate and those beside it."""
    rows = [row for row in _records(WHAT_HELPS) if "tuning" in row]
    last = {_cell(row): row for row in rows if not row["averaging"]}
    gains: dict[tuple[str, str, float], list[list[float]]] = {}  # task, method, share: by rate, in points
    for row in rows:
        if not row["averaging"]:
            continue
        own = last[_cell(row)]
        title = METHOD_TITLES.get(row["method"], row["method"])
        found = gains.setdefault((f"{row['task']}, ε = {row['epsilon']:g}", title, row["averaging"]), [[], [], []])
        rates = sorted(own["tuning"], key=float)
        best = rates.index(f"{own['lr']:g}")
        for gathered, place in zip(found, (best - 1, best, best + 1), strict=True):
            if 0 <= place < len(rates):
                pairs = zip(row["tuning"][rates[place]], own["tuning"][rates[place]], strict=True)
                gathered += [100 * (average - score) for average, score in pairs]
    lines = ["| task | method | averaging | a third of the best rate | best rate | three times it |", "|---" * 6 + "|"]
    for (task, method, share), found in gains.items():
        cells = (f"{mean(values):+.1f} ± {_error(values):.1f}" if values else "" for values in found)
        lines.append(f"| {task} | {method} | {share:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is about, whatever it averages."""
    return row["task"], row["epsilon"], row["method"], row["tool"]


def _by_seed(row: dict[str, Any]) -> dict[int, float]:
    return {seed: 100 * score for seed, score in zip(row["seeds"], row["scores"], strict=True)}


def _error(values: Iterable[float]) -> float:
    """The standard error of their mean; 0 where one value cannot tell."""
    found = list(values)
    return stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0


def _gain(scores: dict[int, float], base: dict[int, float]) -> str:
    """Over the base, seed by seed; in bold past two standard errors."""
    gains = [scores[seed] - base[seed] for seed in scores if seed in base]
    shown = f"{mean(gains):+.1f} ± {_error(gains):.1f}"
    return f"**{shown}**" if abs(mean(gains)) > 2 * _error(gains) > 0 else shown


def audited(name: str) -> str:
    """How close the white-box bound came to the claim, by method and clipping, over all seeds."""
    bar = json.loads((AUDITS / name).read_text())
    summary, ratios = bar["summary"], {}
    for audit in bar["intact"]:
        ratios.setdefault(audit["method"], {}).setdefault(audit["clipping"], []).append(audit["ratio"])
    clippings = list(next(iter(ratios.values())))
    lines = [
        f"{summary['intact_consistent']} of {summary['intact_in_all']} audits of the intact engine were consistent "
        f"({len(bar['batches'])} of them of its batches),",
        f"and {summary['broken_flagged']} of {summary['broken_in_all']} of broken ones flagged.",
        "",
        f"| bound over claim, {bar['plan']['seeds']} seeds | {' | '.join(clippings)} |",
        "|---" * (1 + len(clippings)) + "|",
    ]
    for method, found in ratios.items():
        cells = [f"{min(found[kind]):.2f} to {max(found[kind]):.2f}" for kind in clippings]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def timings() -> str:
    """Samples a second of every contender, the fastest first, workload by workload."""
    lines = ["| workload | contender | samples/s | over best non-private |", "|---|---|---|---|"]
    for stem in BENCHES:
        document = _bench(stem)
        point = document["points"][0]
        done = [t for t in point["timings"] if t["error"] is None]
        best = min(median(t["seconds"]) for t in done if t["name"].startswith("non-private"))
        for t in sorted(done, key=lambda t: median(t["seconds"])):
            seconds = median(t["seconds"])
            speed = f"{t['samples'] / seconds:,.0f}"
            lines.append(f"| {_workload(document)} | {t['name']} | {speed} | {best / seconds:.2f} |")
    return "\n".join(lines)


def cpu_profile() -> str:
    """Milliseconds a step, part by part, of non-private training and of LSG on one core."""
    lines = ["| workload | part | non-private, ms | lsg, ms |", "|---|---|---|---|"]
    for name, found in _bench("cpu-profile")["profiles"].items():
        plain, private = found["non-private"], found["lsg"]
        for part in CPU_PARTS:
            if part in private:
                own = f"{plain[part]:.1f}" if part in plain else "-"
                lines.append(f"| {name} | {part} | {own} | {private[part]:.1f} |")
    return "\n".join(lines)


def cpu_operations() -> str:
    """Microseconds of single operations on one core."""
    lines = ["| layer | operation | µs |", "|---|---|---|"]
    for layer, found in _bench("cpu-profile")["operations"].items():
        lines += [f"| {layer} | {operation} | {microseconds:.0f} |" for operation, microseconds in found.items()]
    return "\n".join(lines)


def _bench(stem: str) -> dict[str, Any]:
    return json.loads((BENCH / f"{stem}.json").read_text())


def _workload(document: dict[str, Any]) -> str:
    return f"{document['points'][0]['preset']['name']}, {document['precision']}, {document['device']}"


def sweeps() -> str:
    """LSG beside non-private training while one property of the workload varies."""
    lines = ["| varied | value | non-private, samples/s | lsg, samples/s | ratio |", "|---|---|---|---|---|"]
    documents = {document["sweep"]: document for document in _records(SWEEPS)}
    for name, field in SWEPT.items():
        document = documents[name]
        for point in document["points"]:
            plain, private = (t["samples"] / median(t["seconds"]) for t in point["timings"])
            value = point["preset"][field]
            lines.append(f"| {name} | {value} | {plain:.1f} | {private:.1f} | {private / plain:.2f} |")
    return "\n".join(lines)


def price_of_searching() -> str:
    """The ε that is left for each run of a paid search; a run is one Gaussian mechanism, as DP-SGD nearly is."""
    totals, delta = (1.0, 3.0, 8.0), 1e-5
    columns = " | ".join(f"each run, ε = {total:g}" for total in totals)
    lines = [f"| `--draw` | `--runs` | nine searches of ten make | {columns} |", "|---" * (3 + len(totals)) + "|"]
    for draw in DRAWS:
        for average in (3, 5, 10, 30):
            repeats = Repeats(draw, average)
            left = [
                curve_epsilon(gaussian_curve(calibrate_score_noise(repeats, total, delta)), delta) for total in totals
            ]
            told = " | ".join(f"{epsilon:.2f}" for epsilon in left)
            lines.append(f"| {draw} | {average} | {repeats.number(0.05)} to {repeats.number(0.95)} | {told} |")
    return "\n".join(lines)


def surrogates() -> str:
    """Full runs beside stand-ins of the same settings: rank correlation, and what the stand-ins' winner is worth."""
    every = json.loads(SURROGATES.read_text())["runs"]
    done = Counter((run["shrink"], run["seed"]) for run in every)
    runs = [run for run in every if done[run["shrink"], run["seed"]] == max(done.values())]  # of whole seeds alone
    scores: dict[int, dict[str, list[float]]] = {}
    for run in runs:
        scores.setdefault(run["shrink"], {}).setdefault(str(run["settings"]), []).append(run["score"])
    full = {key: mean(values) for key, values in scores[1].items()}
    lines = [
        "| `--shrink` | gradients | rank correlation with full runs | its winner, in full | settings, seeds |",
        "|---|---|---|---|---|",
    ]
    work = {k: mean(run["steps"] * run["batch_size"] for run in runs if run["shrink"] == k) for k in scores}
    for shrink in sorted(scores):
        found = {key: mean(values) for key, values in scores[shrink].items() if key in full}
        keys = list(found)
        rank = spearmanr([full[key] for key in keys], [found[key] for key in keys]).statistic
        winner = max(keys, key=lambda key: found[key])
        seeds = min(len(values) for values in scores[shrink].values())
        lines.append(
            f"| {shrink} | {work[shrink] / work[1]:.0%} | {'-' if shrink == 1 else f'{rank:.2f}'} | "
            f"{100 * full[winner]:.1f} % | {len(keys)}, {seeds} |"
        )
    return "\n".join(lines)


def accounting_costs() -> str:
    """Seconds of each accountant, and of the release before where it was measured."""
    stored = json.loads((BENCH / "accounting-cpu.json").read_text())
    calls = {
        "first": "`get_epsilon`, 150 noises, first call",
        "again": "the same, asked again",
        "more": "after one more noise, median",
        "more_longest": "after one more noise, longest of 20",
        "scheduled": "7 steps of a schedule under a target ε, all checks",
        "check": "the check before a step, 150 noises and 3 rates, median",
        "check_longest": "the check before a step, longest of 150",
        "calibration": "`calibrate_noise`, SST-2, ε = 3.3",
    }
    columns = [(name, stored["now"][name], stored.get("before", {}).get(name)) for name in ("prv", "pld", "rdp")]
    lines = ["| seconds | prv | pld | rdp |", "|---|---|---|---|"]
    for key, told in calls.items():
        cells = [
            f"{now[key]:.2g}" + (f" (before: {before[key]:.2g})" if before and key in before else "")
            for _, now, before in columns
        ]
        lines.append(f"| {told} | {' | '.join(cells)} |")
    return "\n".join(lines)


def counted_bytes() -> str:
    """What a logical step hands to collectives, by the number of its micro-batches."""
    document = json.loads((SCALE / "bytes.json").read_text())
    ways: dict[str, dict[int, dict[str, Any]]] = {}
    for run in document["runs"]:
        ways.setdefault(run["way"], {})[run["step"]["micro_batches"]] = run["step"]
    numbers = list(next(iter(ways.values())))
    columns = " | ".join(f"all-reduce, {number} micro-batch{'es' if number > 1 else ''}" for number in numbers)
    lines = [f"| {document['processes']} processes | {columns} | calls | dense gradient over it | beside |"]
    lines.append("|---" * (4 + len(numbers)) + "|")
    for way, steps in ways.items():
        sums = [steps[number]["bytes"]["allreduce"] for number in numbers]
        cells = " | ".join(f"{size:,} B" for size in sums)
        last = steps[numbers[-1]]
        ratio, beside = document["dense_bytes"] / sums[-1], last["total"] - sums[-1]
        lines.append(f"| {way} | {cells} | {last['calls']['allreduce']} | {ratio:.3g} | {beside:,} B |")
    return "\n".join(lines)


def scale_bytes() -> str:
    """What a step sends, computed."""
    columns = " | ".join(f"sent, {gpus} GPUs" for gpus in SHOWN_GPUS)
    lines = [f"| model | way | tensors | {columns} | a record, {SHOWN_GPUS[-1]} GPUs |"]
    lines.append("|---" * (4 + len(SHOWN_GPUS)) + "|")
    for model, way, found in _ways():
        rows = [row["bytes"] for row in _shown(found)]
        sent = " | ".join(_amount(row["sent"]) for row in rows)
        lines.append(
            f"| {model} | {way} | {_amount(rows[0]['payload'])} | {sent} | {_amount(rows[-1]['sent_a_record'])} |"
        )
    return "\n".join(lines)


def scale_memory() -> str:
    """What a GPU holds, computed; what does not fit in bold."""
    columns = " | ".join(f"{gpus} GPUs, GB" for gpus in SHOWN_GPUS)
    batches = " | ".join(f"largest micro-batch, {gpus} GPUs" for gpus in (SHOWN_GPUS[0], SHOWN_GPUS[-1]))
    lines = [f"| model | way | {columns} | largest part, {SHOWN_GPUS[-1]} GPUs | {batches} |"]
    lines.append("|---" * (5 + len(SHOWN_GPUS)) + "|")
    for model, way, found in _ways():
        rows = _shown(found)
        sizes = [f"{sum(row['memory'].values()) / 1e9:,.1f}" for row in rows]
        cells = " | ".join(size if row["fits"] else f"**{size}**" for size, row in zip(sizes, rows, strict=True))
        parts = rows[-1]["memory"]
        part = max(parts, key=lambda name: parts[name])
        fitting = " | ".join(f"{row['largest_micro_batch']:,}" for row in (rows[0], rows[-1]))
        lines.append(f"| {model} | {way} | {cells} | {part}, {parts[part] / 1e9:,.1f} | {fitting} |")
    return "\n".join(lines)


def scale_time() -> str:
    """Efficiency on two networks, with several micro-batches a step and with one; computed."""
    last = SHOWN_GPUS[-1]
    several = " | ".join(f"{gpus} GPUs" for gpus in SHOWN_GPUS)
    lines = [
        f"| model | way | a step, {last} GPUs | {several} | {last}, 1 micro-batch | Ethernet, {last} | the same, 1 |"
    ]
    lines.append("|---" * (6 + len(SHOWN_GPUS)) + "|")
    for model, way, found in _ways():
        rows = _shown(found)
        many = next(iter(rows[0]["efficiency"]["InfiniBand"]))
        shown = [(row, "InfiniBand", many) for row in rows]
        shown += [(rows[-1], "InfiniBand", "1"), (rows[-1], "Ethernet", many), (rows[-1], "Ethernet", "1")]
        cells = (f"{row['efficiency'][net][number]:.2f}" if row["fits"] else "-" for row, net, number in shown)
        seconds = f"{sum(rows[-1]['seconds'].values()):,.2f} s" if rows[-1]["fits"] else "-"
        lines.append(f"| {model} | {way} | {seconds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scale_speeds() -> str:
    """What one GPU does alone, and where that is from."""
    lines = ["| model | method | records/s | from |", "|---|---|---|---|"]
    for model, way, found in _ways():
        row = f"| {model} | {way.split(',')[0]} | {found['records_per_second_alone']:,.4g} | {found['source']} |"
        lines += [row] if row not in lines else []
    return "\n".join(lines)


def scale_breaks() -> str:
    """The first number of GPUs at which something exceeds a tenth of a step, and what; computed."""
    ways = ("same work on each GPU", "same logical batch")
    lines = [f"| model | way | fits from | {' | '.join(ways)} |", "|---" * (3 + len(ways)) + "|"]
    for model, way, found in _ways():
        breaks = [found["breaks"][name] for name in ways]
        fits = breaks[0]["fits_from"]
        cells = " | ".join(_break(each, fits) for each in breaks)
        lines.append(f"| {model} | {way} | {f'{fits} GPUs' if fits else 'never'} | {cells} |")
    return "\n".join(lines)


def _break(found: dict[str, Any], fits_from: int | None) -> str:
    if found["fits_from"] != fits_from:
        return f"memory, below {found['fits_from']:,} GPUs"
    if found["gpus"] is None:
        return found["part"] or "nothing"
    share = f", {found['share']:.0%} of a step" if found["share"] else ""
    return f"{found['part']} at {found['gpus']:,}{share}"


def _ways() -> Iterable[tuple[str, str, dict[str, Any]]]:
    """Model, way to train, and what was computed of it."""
    for model, found in json.loads((SCALE / "simulation.json").read_text())["models"].items():
        for way, computed in found["ways"].items():
            yield model, way, computed


def _shown(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if row["gpus"] in SHOWN_GPUS]


def _amount(size: float) -> str:
    """Bytes, in three digits."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{float(f'{size / unit:.3g}'):g} {name}"
    return f"{size:.0f} B"


def architectures() -> str:
    """Which families of transformers, and which of PEFT's methods, train as they should."""
    found = json.loads(ARCHITECTURES.read_text())
    lines = []
    for title, kinds in (("family", KINDS), ("adapter", ("adapter",))):
        rows = [row for row in found["rows"] if row["kind"] in kinds]
        trains = sum(row["trains"] for row in rows)
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if name != "lsg")
        lines += [f"{trains} of {len(rows)} train ({versions}).", "", f"| {title} | model | outcome |", "|---|---|---|"]
        for row in rows:
            outcome = f"trains, error {row['error']:.0e}" if row["trains"] else f"refused: {_shortened(row)}"
            lines.append(f"| {row['name']} | `{row['class']}` | {outcome} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _shortened(row: dict[str, Any]) -> str:
    """The first culprit that a refusal names."""
    words = row.get("refused") or row.get("failed") or f"error {row['error']:.0e}"
    first = words.removeprefix("this model cannot be trained privately: ").split("; ")[0]
    return first if len(first) <= 160 else f"{first[:160].rsplit(' ', 1)[0]} ..."


def opacus_grids() -> str:
    """How the layers of Opacus's tests fare: cells, right ones, refused ones and why."""
    lines = ["| layer | cases | right | refused | why |", "|---|---|---|---|---|"]
    for layer, found in json.loads(OPACUS_GRIDS.read_text())["layers"].items():
        counts, whys = found["outcomes"], Counter[str]()
        for refusal in found["refused"]:
            reason = next(short for part, short in REASONS.items() if part in refusal["why"])
            whys[reason] += refusal["count"]
        why = "; ".join(f"{reason}: {count:,}" for reason, count in whys.items())
        cases = sum(counts.values())
        lines.append(f"| `{layer}` | {cases:,} | {counts['right']:,} | {counts.get('refused', 0):,} | {why or '-'} |")
    return "\n".join(lines)


def _demoted(page: str) -> str:
    return re.sub(r"^#", "##", page, flags=re.MULTILINE)


# Page, beside this file -> name of a part, between two comments -> what makes it.
PARTS = {
    "../README.md": {"measured": front_figure.table},
    "hugging-face.md": {"architectures": architectures},
    "from-opacus.md": {"grids": opacus_grids},
    "audit.md": {"bar": partial(audited, "bar.json"), "units": partial(audited, "units.json")},
    "performance.md": {
        "gpu": front_figure.all_contenders,
        "bench": timings,
        "sweeps": sweeps,
        "accounting": accounting_costs,
        "cpu profile": cpu_profile,
        "cpu operations": cpu_operations,
    },
    "scale.md": {
        "bytes measured": counted_bytes,
        "bytes computed": scale_bytes,
        "memory": scale_memory,
        "time": scale_time,
        "speeds": scale_speeds,
        "breaks": scale_breaks,
    },
    "tune.md": {"price": price_of_searching, "surrogates": surrogates},
    "what-helps.md": {
        "cells": what_helps,
        "averaging": averaged,
        "recipes": recipe_runs,
        "heads": head_tables.heads,
        "defaults": default_tables.defaults,
    },
    "train.md": {"emails": email_tables.emails, "presets": presets, "other methods": other_methods},
    "reproduce.md": {
        "masks": mask_signal,
        "clips": clip_study,
        "tuning": tuned,
        "gpu results": on_gpu,
        "cifar curves": cifar_curves,
        "results": reproduced,
    },
}


def rendered(name: str) -> str:
    """The page with each part between its two comments made anew."""
    page = (DOCS / name).read_text()
    for part, make in PARTS[name].items():
        begin, end = f"<!-- {part}: begin (docs/render.py) -->", f"<!-- {part}: end -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return page


def main(arguments: Sequence[str]) -> int:
    """The exit code: 1 if `--check` found pages that differ, which it prints."""
    if list(arguments) not in ([], ["--check"]):
        print("usage: python docs/render.py [--check]")
        return 2
    stale = [name for name in PARTS if rendered(name) != (DOCS / name).read_text()]
    if not arguments:
        for name in stale:
            (DOCS / name).write_text(rendered(name))
        front_figure.draw(front_figure.PICTURE)
        return 0
    for name in stale:
        print(f"{(DOCS / name).resolve().relative_to(DOCS.parent)} is out of date: run python docs/render.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
