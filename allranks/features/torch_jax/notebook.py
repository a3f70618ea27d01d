"""Chooses in the notebook which process groups torch has on the ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from allranks.cluster.features import NotebookFeature
from allranks.cluster.options import StartOption

_OPTION = StartOption(
    "torch",
    "ALLRANKS_TORCH",
    ("allranks", "gloo", "nccl"),
    "torch's process groups: those of allranks on CPUs and GPUs; torch's own (gloo); or those of "
    "allranks on CPUs and torch's NCCL on GPUs (nccl). The default is nccl, and allranks where "
    "ranks share a GPU",
)


class TorchGroups(NotebookFeature):
    """The option ``--torch``, and a line about it at the start."""

    start_options = (_OPTION,)

    def start_text(self, settings: Mapping[str, str]) -> str:
        if importlib.util.find_spec("torch") is None:
            return ""
        chosen = settings.get(_OPTION.name)
        if chosen == "gloo":
            return "torch.distributed uses its own process groups (gloo)."
        if chosen == "allranks":
            return "torch.distributed runs on allranks, also with the backends gloo and nccl."
        return "torch.distributed runs on allranks, also with the backend gloo."


FEATURE = TorchGroups
