"""Installs the name ``horovod``, and the version of TensorFlow that the environment asks for."""

from __future__ import annotations

from allranks.engine.features import RankFeature
from allranks.horovod import alias


class HorovodAlias(RankFeature):
    """Changes what ``import`` finds, before a cell or MPI has imported anything."""

    def starting(self) -> None:
        alias.install()
        alias.install_tensorflow()


FEATURE = HorovodAlias
