"""Fabrics with published numbers: the constants of NCCL's own tuner, on two kinds of cluster.

Source: NCCL 2.30, src/graph/tuning.cc (baseLatencies, hwLatencies, llMaxBws, nvlsEfficiency, and
the shares of LL, LL128 and Simple) and src/graph/topo.h (SM90_NVLINK_BW). Left out of it: caps per
channel, the corrections for medium sizes, and the plateau factor for rings over a network.
"""

from __future__ import annotations

from allranks.collectives.model.fabric import Fabric, Latency, Protocol, Share

_US = 1e-6
_GB = 1e9

TREE_SHARE = 0.92
"""What a tree gets of the bandwidth that a ring gets."""

NVLS_EFFICIENCY = 0.85
"""nvlsEfficiency of Hopper."""


def _latency(base: float, inside: float, between: float) -> Latency:
    return Latency(base * _US, inside * _US, between * _US)


HGX_H100 = Fabric(
    name="hosts of 8 H100, 8 x 400 Gb/s each; NCCL 2.30 tuner constants",
    protocols=(
        Protocol(
            "LL",
            {"ring": _latency(6.6, 0.6, 2.7), "tree": _latency(6.8, 0.6, 5.0)},
            {
                "ring": Share(0.5, 0.5, 141 * _GB, 35 * _GB),
                "tree": Share(TREE_SHARE / 3.8, TREE_SHARE / 3.8, 141 * _GB, 35 * _GB),
            },
        ),
        Protocol(
            "LL128",
            {"ring": _latency(14.0, 1.9, 4.0), "tree": _latency(14.0, 1.25, 8.5)},
            {
                "ring": Share(0.92, 0.92),
                "tree": Share(TREE_SHARE * 7 / 9, TREE_SHARE * 120 / 128),
            },
        ),
        Protocol(
            "Simple",
            {
                "ring": _latency(8.4, 3.4, 14.0),
                "tree": _latency(8.4, 4.0, 14.0),
                "nvls": _latency(0.0, 25.0, 0.0),
            },
            {
                "ring": Share(),
                "tree": Share(TREE_SHARE, TREE_SHARE),
                "nvls": Share(NVLS_EFFICIENCY),
            },
        ),
    ),
    inside_bandwidth=18 * 20.6 * _GB,
    between_bandwidth=8 * 400 / 8 * _GB,
    pipelined_tree=True,
)
"""18 NVLinks of 20.6 GB/s a GPU (the rate after protocol, as NCCL counts it); line rate outside."""

P100_25GBE = Fabric(
    name="hosts of 4 P100 over PCIe, one 25 Gb/s card each; NCCL 2.30 tuner constants",
    protocols=(Protocol("Simple", {"ring": _latency(8.4, 5.7, 14.0)}, {"ring": Share()}),),
    inside_bandwidth=12 * _GB,
    between_bandwidth=25 / 8 * _GB,
)
"""The machines of Horovod's published runs. Rings only: NCCL had no trees before 2.4 (2019)."""
