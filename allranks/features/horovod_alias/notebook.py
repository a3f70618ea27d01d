"""``import horovod`` in the notebook."""

from __future__ import annotations

from contextlib import ExitStack

from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster.features import NotebookFeature, ProcessChange


def _install(undo: ExitStack) -> None:
    # Here: its import alone replaces the name, which a script without the extension keeps.
    from allranks.horovod import alias

    alias.install(in_notebook=True)
    undo.callback(alias.uninstall)


class NotebookAlias(NotebookFeature):
    """Lets ``import horovod`` find allranks as long as the extension is loaded."""

    _alias = ProcessChange(_install)

    @classmethod
    def loaded(cls, shell: InteractiveShell, undo: ExitStack) -> None:
        undo.enter_context(cls._alias)


FEATURE = NotebookAlias
