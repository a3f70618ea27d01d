"""``import horovod`` in the notebook."""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster.features import NotebookFeature


class NotebookAlias(NotebookFeature):
    """Lets ``import horovod`` find allranks as long as the extension is loaded."""

    @classmethod
    def loaded(cls, shell: InteractiveShell) -> None:
        # Here: its import alone replaces the name, which a script without the extension keeps.
        from allranks.horovod import alias

        alias.install(in_notebook=True)

    @classmethod
    def unloaded(cls) -> None:
        from allranks.horovod import alias

        alias.uninstall()


FEATURE = NotebookAlias
