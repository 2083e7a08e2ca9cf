"""results/bench/*.json in, the table in docs/performance.md out: `python benchmarks/render.py`."""

import json
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
SWEEPS = {"rank": "rank", "sparsity": "sparsity", "length": "tokens", "width": "width", "batch": "micro_batch"}
ORDER = (
    "cpu-encoder-fp32-cpu",
    "cpu-wrn-fp32-cpu",
    "encoder-bf16-cuda",
    "encoder-bf16-cuda-all",
    "encoder-tf32-cuda",
    "decoder-bf16-cuda",
    "wrn28-4-tf32-cuda",
)
OLDER = ("encoder-bf16-cuda-all", "encoder-tf32-cuda")  # docs/performance.md says by how much


def table() -> str:
    lines = ["| workload | contender | samples/s | over best non-private |", "|---|---|---|---|"]
    for stem in ORDER:
        document = _document(stem)
        point = document["points"][0]
        done = [t for t in point["timings"] if t["error"] is None]
        best = min(median(t["seconds"]) for t in done if t["name"].startswith("non-private"))
        for t in sorted(done, key=lambda t: median(t["seconds"])):
            seconds = median(t["seconds"])
            speed = f"{t['samples'] / seconds:,.0f}"
            lines.append(f"| {_workload(stem, document)} | {t['name']} | {speed} | {best / seconds:.2f} |")
    return "\n".join(lines)


def memory() -> str:
    """Of the files that have it."""
    lines = [
        "| workload | contender | peak, GiB | over non-private | over non-private compiled |",
        "|---|---|---|---|---|",
    ]
    for stem in ORDER:
        document = _document(stem)
        peaks = {
            t["name"]: t["peak_bytes"] / 2**30 for t in document["points"][0]["timings"] if t.get("reserved_bytes")
        }
        for name, peak in peaks.items():
            plain = [peaks.get("non-private"), peaks.get("non-private compiled")]
            ratios = " | ".join(f"{peak / other:.2f}" if other else "-" for other in plain)
            lines.append(f"| {_workload(stem, document)} | {name} | {peak:.2f} | {ratios} |")
    return "\n".join(lines)


def _document(stem: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / "bench" / f"{stem}.json").read_text())


def _workload(stem: str, document: dict[str, Any]) -> str:
    older = " (older code)" if stem in OLDER else ""
    return f"{document['points'][0]['preset']['name']}, {document['precision']}, {document['device']}{older}"


def sweeps() -> str:
    lines = ["| varied | value | non-private, samples/s | lsg, samples/s | ratio |", "|---|---|---|---|---|"]
    for name, field in SWEEPS.items():
        document = _document(f"cpu-encoder-fp32-cpu-{name}")
        for point in document["points"]:
            plain, private = (t["samples"] / median(t["seconds"]) for t in point["timings"])
            value = point["preset"][field]
            lines.append(f"| {name} | {value} | {plain:.1f} | {private:.1f} | {private / plain:.2f} |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    for part, make in {"bench": table, "memory": memory, "sweeps": sweeps}.items():
        begin, end = f"<!-- {part}: begin (benchmarks/render.py) -->", f"<!-- {part}: end -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{make()}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
