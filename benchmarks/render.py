"""results/bench/*.json in, the table in docs/performance.md out: `python benchmarks/render.py`."""

import json
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
BEGIN, END = "<!-- bench: begin (benchmarks/render.py) -->", "<!-- bench: end -->"
SWEEPS_BEGIN, SWEEPS_END = "<!-- sweeps: begin (benchmarks/render.py) -->", "<!-- sweeps: end -->"
SWEEPS = {"rank": "rank", "sparsity": "sparsity", "length": "tokens", "width": "width", "batch": "micro_batch"}
# Only here does the peak count what CUDA graphs hold, for each contender by itself (see "Peak memory" on the page).
MEMORY_COUNTS = {"encoder-tf32-cuda"}
ORDER = ("cpu-encoder-fp32-cpu", "encoder-bf16-cuda", "encoder-tf32-cuda", "decoder-bf16-cuda", "wrn28-4-tf32-cuda")


def table() -> str:
    lines = ["| workload | contender | samples/s | over best non-private | peak GiB |", "|---|---|---|---|---|"]
    for stem in ORDER:
        document = json.loads((ROOT / "results" / "bench" / f"{stem}.json").read_text())
        point = document["points"][0]
        done = [t for t in point["timings"] if t["error"] is None]
        best = min(median(t["seconds"]) for t in done if t["name"].startswith("non-private"))
        for t in sorted(done, key=lambda t: median(t["seconds"])):
            if stem not in MEMORY_COUNTS:
                t["peak_bytes"] = None
            lines.append(_row(f"{point['preset']['name']}, {document['precision']}, {document['device']}", t, best))
    return "\n".join(lines)


def _row(workload: str, timing: dict[str, Any], best: float) -> str:
    seconds = median(timing["seconds"])
    peak = timing["peak_bytes"]
    memory = "" if peak is None else f"{peak / 2**30:.2f}"
    speed = f"{timing['samples'] / seconds:,.0f}"
    return f"| {workload} | {timing['name']} | {speed} | {best / seconds:.2f} | {memory} |"


def sweeps() -> str:
    lines = ["| varied | value | non-private, samples/s | lsg, samples/s | ratio |", "|---|---|---|---|---|"]
    for name, field in SWEEPS.items():
        document = json.loads((ROOT / "results" / "bench" / f"cpu-encoder-fp32-cpu-{name}.json").read_text())
        for point in document["points"]:
            plain, private = (t["samples"] / median(t["seconds"]) for t in point["timings"])
            value = point["preset"][field]
            lines.append(f"| {name} | {value} | {plain:.1f} | {private:.1f} | {private / plain:.2f} |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    for begin, end, text in ((BEGIN, END, table()), (SWEEPS_BEGIN, SWEEPS_END, sweeps())):
        head, rest = page.split(begin)
        page = f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
