"""Chooses in the notebook which process groups torch has on the ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from allranks.cluster.features import NotebookFeature
from allranks.cluster.options import StartOption

_OPTION = StartOption(
    "torch",
    "ALLRANKS_TORCH",
    ("allranks", "gloo"),
    "torch's process groups on CPUs; those of allranks (the default) compare the ranks' calls",
)


class TorchGroups(NotebookFeature):
    """The option ``--torch``, and a line about it at the start."""

    start_options = (_OPTION,)

    def start_text(self, settings: Mapping[str, str]) -> str:
        if importlib.util.find_spec("torch") is None:
            return ""
        if settings.get(_OPTION.name) == "gloo":
            return "torch.distributed uses its own process groups (gloo)."
        return "torch.distributed runs on allranks, also with the backend gloo."


FEATURE = TorchGroups
