"""Collectives in; bytes that a GPU sends for them, and seconds that they take, out. Speeds of links are assumed."""

import math
from dataclasses import dataclass

GPUS_A_NODE = 8
# Each link is assumed to reach this share of its data sheet's speed. On H100 nodes that do nothing else nccl-tests are
# reported to reach more (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests).
REACHED = 0.8
# NVLink 4 on H100 and H200: 900 GB/s a GPU, both directions together, so 450 GB/s to send
# (https://www.nvidia.com/en-us/data-center/h200/).
NVLINK = 450e9
# Seconds of a call, of a hop over NVLink and of a hop over the network: `baseLat` and `hwLat`, ring and simple
# protocol, in src/graph/tuning.cc of NCCL (https://github.com/NVIDIA/nccl, commit 01afd20).
CALL_SECONDS, NVLINK_SECONDS, NETWORK_SECONDS = 8.4e-6, 3.4e-6, 9.6e-6


@dataclass(frozen=True)
class Network:
    """Between nodes. node_bytes: a second, what a node can send."""

    name: str
    node_bytes: float


# NDR: 400 Gb/s, 50 GB/s, for each of a node's eight GPUs, as in a DGX H200
# (https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html).
INFINIBAND = Network("InfiniBand", GPUS_A_NODE * 50e9)
# One card of 100 Gb/s for the whole node, as in machines that are rented without InfiniBand. Its hops take longer than
# those of InfiniBand; that is not counted.
ETHERNET = Network("Ethernet", 12.5e9)


@dataclass(frozen=True)
class Collective:
    """payload: bytes of the whole tensor, before it is cut among GPUs. calls: how many calls it comes in."""

    kind: str  # all_reduce, all_gather or reduce_scatter
    payload: float
    calls: int = 1

    def sent(self, gpus: int) -> float:
        """Bytes that each GPU sends, by a ring."""
        return (2 if self.kind == "all_reduce" else 1) * self.payload * (gpus - 1) / gpus

    def seconds(self, gpus: int, network: Network) -> float:
        """Bandwidth of a ring; latency of a tree for an all-reduce, of a ring for the others, as NCCL reckons them."""
        if gpus == 1:
            return 0.0
        return self.sent(gpus) / ring_bytes(gpus, network) + self.calls * _latency(self.kind, gpus)


def ring_bytes(gpus: int, network: Network) -> float:
    """A second: what each GPU of a ring passes on. Rings leave a node over all of its network cards together."""
    within = REACHED * NVLINK
    return within if gpus <= GPUS_A_NODE else min(within, REACHED * network.node_bytes)


def _latency(kind: str, gpus: int) -> float:
    nodes = math.ceil(gpus / GPUS_A_NODE)
    if kind == "all_reduce":
        within, between = 2 * (math.ceil(gpus / nodes) - 1), 2 * math.ceil(math.log2(nodes))
    else:
        within, between = gpus - nodes, nodes - 1
    return CALL_SECONDS + within * NVLINK_SECONDS + between * NETWORK_SECONDS
