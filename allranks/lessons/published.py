"""Published measurements for comparison with the model."""

from __future__ import annotations

from dataclasses import dataclass

FLOAT32_NBYTES = 4


@dataclass(frozen=True)
class Scaling:
    """A data-parallel training run."""

    model: str
    # On one GPU.
    images_per_second: float
    parameters: int
    ranks: int
    hosts: int
    # Images a second per GPU, relative to one GPU alone.
    efficiency: float
    # Images per GPU and step.
    batch: int = 64

    @property
    def alone_seconds(self) -> float:
        return self.batch / self.images_per_second

    @property
    def gradient_nbytes(self) -> int:
        # In float32.
        return FLOAT32_NBYTES * self.parameters


# 512 P100 on 128 servers with 25 Gb/s RoCE.
#
# Source: efficiencies from Horovod's docs/benchmarks.rst (read off a chart, two digits); images a
# second of one GPU at batch size 64 from the table in Horovod's README up to pull request #44
# (October 2017), which was measured on 16 GPUs of the same kind. Parameters as Keras counts them.
# Horovod's documentation and table give batch size 64, a maintainer's comment 32 (issue #425):
# with 32 the backward pass of VGG-16 is too short to hide what 68 % requires, even at line rate.
HOROVOD_512 = (
    Scaling("Inception V3", 134.4, 23_851_784, 512, 128, 0.90),
    Scaling("ResNet-101", 119.4, 44_707_176, 512, 128, 0.90),
    Scaling("VGG-16", 130.9, 138_357_544, 512, 128, 0.68),
)
