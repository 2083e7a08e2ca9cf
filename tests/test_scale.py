"""Many GPUs: the simulator's figures against others reckoned by hand, and the counter of bytes against DDP."""

import importlib
import json
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
counter: Any = importlib.import_module("scale_counter")
links: Any = importlib.import_module("scale_links")
shapes: Any = importlib.import_module("scale_shapes")
simulator: Any = importlib.import_module("scale_simulator")
speeds: Any = importlib.import_module("scale_speeds")
ways: Any = importlib.import_module("scale_ways")

SHAPES = {name: shapes.shapes(preset) for name, preset in shapes.MODELS.items()}
ENCODER, LLAMA = SHAPES["encoder"], SHAPES["llama-8b"]
WAYS = {way.title: way for way in ways.WAYS}
STORED = json.loads((ROOT / "results" / "scale" / "simulation.json").read_text())["models"]
COUNTED = json.loads((ROOT / "results" / "scale" / "bytes.json").read_text())


# --- sizes and bytes --------------------------------------------------------------------------------------------------


def test_the_sizes_are_those_of_the_layers() -> None:
    """RoBERTa-base: four matrices of 768 x 768 and two of 768 x 3072 a layer, and one in the head."""
    assert ENCODER.projected == 12 * (4 * 768 * 768 + 2 * 768 * 3072) + 768 * 768
    assert ENCODER.kept == 4 * (12 * (4 * 1536 + 2 * 3840) + 1536)  # (1-p) r = 4
    biases, norms = 12 * (4 * 768 + 3072 + 768) + 768, (2 * 12 + 1) * 2 * 768
    assert ENCODER.dense == biases + norms + 768 * 2 + 2  # the last layer has two classes: too thin to project
    assert (LLAMA.weights, SHAPES["llama-70b"].weights) == (8_030_261_248, 70_553_706_496)


def test_lsg_sends_less_than_a_hundredth_of_the_whole_gradient() -> None:
    lsg, plain = (ways.update_collective(ENCODER, WAYS[name]) for name in ("lsg, replicas", "non-private, DDP"))
    assert plain.payload == 4 * 85_648_130
    assert lsg.payload == 4 * (669_696 + 123_650 + 1)
    assert lsg.payload <= plain.payload / 100


def test_micro_batches_multiply_what_fsdp_sends_and_nothing_of_replicas() -> None:
    for title, way in WAYS.items():
        one, eight = (ways.bytes_of_step(LLAMA, way, 64, number)["payload"] for number in (1, 8))
        assert (eight > one) == way.sharded, title
    plain, lsg = (
        ways.bytes_of_step(LLAMA, WAYS[f"{kind}, FSDP2"], 64, 8)["payload"] for kind in ("non-private", "lsg")
    )
    assert plain == 8 * (2 * 2 * LLAMA.weights + 2 * LLAMA.trained)
    thin = 4 * 9 * (LLAMA.rows + LLAMA.columns) + 4 * (LLAMA.summed + 1)
    assert lsg == 8 * 2 * 2 * LLAMA.weights + thin


def test_a_ring_sends_what_it_must() -> None:
    assert links.Collective("all_reduce", 1000).sent(4) == 1500
    assert links.Collective("all_gather", 1000).sent(4) == 750
    assert links.Collective("reduce_scatter", 1000).sent(1) == 0


def test_a_collective_takes_bandwidth_and_hops() -> None:
    reduced = links.Collective("all_reduce", 3.6e9)
    assert reduced.seconds(1, links.INFINIBAND) == 0
    within = 2 * 3.6e9 * 7 / 8 / 360e9 + 8.4e-6 + 14 * 3.4e-6  # 450 GB/s, four fifths; up and down a chain of 8
    assert reduced.seconds(8, links.INFINIBAND) == pytest.approx(within)
    between = 2 * 3.6e9 * 63 / 64 / 320e9 + 8.4e-6 + 14 * 3.4e-6 + 6 * 9.6e-6  # 8 nodes: a tree of depth 3
    assert reduced.seconds(64, links.INFINIBAND) == pytest.approx(between)
    gathered = links.Collective("all_gather", 3.6e9, calls=10)
    ring = 3.6e9 * 63 / 64 / 10e9 + 10 * (8.4e-6 + 56 * 3.4e-6 + 7 * 9.6e-6)
    assert gathered.seconds(64, links.ETHERNET) == pytest.approx(ring)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_memory_is_that_of_the_formulas() -> None:
    """docs/performance.md: W + 2wP, 4FB of the records, 2 x 2TV + 256 MiB of the logits; wP of plain training."""
    lsg, plain = (ways.memory(LLAMA, WAYS[name], 8, 16) for name in ("lsg, replicas", "non-private, DDP"))
    assert lsg["weights and optimizer"] == plain["weights and optimizer"] == 2 * LLAMA.weights + 4 * LLAMA.trained
    assert plain["gradients"] == 2 * LLAMA.trained
    assert lsg["gradients"] == 4 * LLAMA.summed * 18
    assert lsg["logits or lift"] == 2 * 2 * 16 * 512 * 128_256 + 256 * 2**20


def test_fsdp_cuts_the_state_and_not_the_records() -> None:
    whole, shared = (ways.memory(LLAMA, WAYS["lsg, FSDP2"], gpus, 16) for gpus in (1, 64))
    assert shared["weights and optimizer"] == whole["weights and optimizer"] / 64
    assert shared["gradients"] == whole["gradients"]
    within = ways.memory(LLAMA, WAYS["lsg, FSDP2 within a node"], 64, 16)
    assert within["weights and optimizer"] == whole["weights and optimizer"] / 8


def test_a_measured_peak_is_met() -> None:
    for title, method in (("lsg, replicas", "lsg"), ("Opacus, DPDDP", "opacus"), ("non-private, DDP", "plain")):
        peak = speeds.speeds()["encoder"][method].peak
        assert sum(ways.memory(ENCODER, WAYS[title], 8, 128, peak).values()) == pytest.approx(peak)


@pytest.mark.parametrize("title", WAYS)
def test_the_largest_micro_batch_fits_and_the_next_does_not(title: str) -> None:
    way = WAYS[title]
    found = ways.largest_micro_batch(LLAMA, way, 64, None)
    assert found > 0
    assert sum(ways.memory(LLAMA, way, 64, found).values()) <= ways.GPU_BYTES
    assert sum(ways.memory(LLAMA, way, 64, found + 1).values()) > ways.GPU_BYTES


def test_seventy_billion_fit_on_sharded_gpus_alone() -> None:
    for title, found in STORED["llama-70b"]["ways"].items():
        assert all(row["fits"] == WAYS[title].sharded for row in found["rows"]), title


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", SHAPES)
def test_one_gpu_has_the_speed_that_was_given(model: str) -> None:
    for method, speed in speeds.speeds()[model].items():
        preset = SHAPES[model].preset
        records = preset.micro_batch * preset.micro_batches
        parts = simulator.step(SHAPES[model], ways.Way("", method), 1, records, speed)
        assert records / sum(parts.values()) == pytest.approx(speed.records, rel=1e-3)


@pytest.mark.parametrize("title", WAYS)
def test_more_gpus_never_hide_more_traffic(title: str) -> None:
    way, speed = WAYS[title], speeds.speeds()["encoder"][WAYS[title].method]
    shown = []
    for gpus in (8, *simulator.GPUS):
        parts = simulator.step(ENCODER, way, gpus, 128, speed)
        shown.append(parts.get("all-reduce", 0) + parts.get("gathers", 0))
    assert shown == sorted(shown)


def test_a_slower_network_is_never_faster() -> None:
    for title, way in WAYS.items():
        speed = speeds.speeds()["llama-8b"][way.method]
        fast, slow = (simulator.efficiency(LLAMA, way, 64, 16, speed, n) for n in (links.INFINIBAND, links.ETHERNET))
        assert slow <= fast, title


def test_what_breaks_is_found_where_it_starts() -> None:
    way, speed = WAYS["non-private, FSDP2"], speeds.speeds()["encoder"]["plain"]
    found = simulator.first_break(ENCODER, way, speed, None)

    def share(gpus: int) -> float:
        parts = simulator.step(ENCODER, way, gpus, 1024, speed)
        return parts[found["part"]] / sum(parts.values())

    assert share(found["gpus"]) == found["share"] > simulator.BREAKS >= share(found["gpus"] // 2)
    huge = replace(LLAMA, frozen=10**12)
    speed = speeds.speeds()["llama-8b"]["lsg"]
    assert simulator.first_break(huge, WAYS["lsg, replicas"], speed, None)["part"] == "memory"


def test_an_extrapolated_speed_goes_by_multiplications() -> None:
    small, large = (speeds.speeds()[name]["lsg"].records for name in ("llama-8b", "llama-70b"))
    assert 8.5 < small / large < 9.5  # 9.26 times as many weights
    assert not speeds.speeds()["llama-8b"]["lsg"].source.startswith("front-")


# --- results ----------------------------------------------------------------------------------------------------------


def numbers(value: Any, path: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    leaves = [numbers(each, f"{path}/{key}") for key, each in items]
    return {path: value} if not leaves else {key: leaf for part in leaves for key, leaf in part.items()}


def test_the_stored_simulation_is_what_the_code_computes() -> None:
    """Mended by `python benchmarks/scale_simulator.py`, then `python docs/render.py`."""
    assert numbers(simulator.simulate()) == pytest.approx(numbers(STORED))


def test_the_counted_bytes_are_the_computed_ones() -> None:
    assert COUNTED["ranks_agree"] and COUNTED["dense_bytes"] == 4 * ENCODER.trained
    sums = {(run["way"], run["step"]["micro_batches"]): run["step"]["bytes"]["allreduce"] for run in COUNTED["runs"]}
    for number in (1, 2, 8):
        assert sums["lsg", number] == ways.update_collective(ENCODER, WAYS["lsg, replicas"]).payload
        assert sums["ddp", number] == sums["opacus dpddp", number] == 4 * ENCODER.trained
        assert sums["ddp, without no_sync", number] == number * 4 * ENCODER.trained
    for run in COUNTED["runs"]:
        if run["way"] == "lsg":
            assert run["step"]["total"] < COUNTED["dense_bytes"] / 100  # with all that is sent beside the sum


# --- the counter ------------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group of this process alone: what is handed to it is what would travel."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_counter_finds_what_ddp_reduces() -> None:
    model = nn.Sequential(nn.Linear(100, 80), nn.ReLU(), nn.Linear(80, 3))
    wrapped = DistributedDataParallel(model)
    with counter.CollectiveBytes() as counted:
        for _ in range(2):
            wrapped(torch.randn(4, 100)).sum().backward()
    size = sum(4 * p.numel() for p in model.parameters())
    assert counted.bytes["allreduce"] == 2 * size
    counted.clear()
    assert not counted.bytes and not counted.calls


@pytest.mark.usefixtures("alone")
def test_the_counter_knows_each_collective() -> None:
    def counted(call: Any) -> tuple[dict[str, int], dict[str, int]]:
        with counter.CollectiveBytes() as found:
            call()
        return dict(found.bytes), dict(found.calls)

    def numbers_of(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    assert counted(lambda: dist.all_reduce(numbers_of(3, torch.float64))) == ({"allreduce": 24}, {"allreduce": 1})
    assert counted(lambda: dist.broadcast(numbers_of(7), 0)) == ({"broadcast": 28}, {"broadcast": 1})
    assert counted(lambda: dist.all_gather([numbers_of(5)], numbers_of(5))) == ({"allgather": 20}, {"allgather": 1})
    assert counted(lambda: dist.reduce_scatter(numbers_of(5), [numbers_of(5)]))[0] == {"reduce_scatter": 20}
    assert counted(dist.barrier) == ({}, {})
    assert counted(lambda: numbers_of(5) + 1) == ({}, {})
