"""``import horovod`` in the notebook, and the arguments of ``horovod.run``.

Source: ``horovod.run`` of Horovod 0.28.
"""

from __future__ import annotations

from IPython.core.interactiveshell import InteractiveShell

from allranks.cluster.features import NotebookFeature
from allranks.cluster.options import RunArgument

#: Arguments of Horovod without an effect here.
_IGNORED = (
    "start_timeout",
    "disable_cache",
    "verbose",
    "use_gloo",
    "use_mpi",
    "network_interface",
    "network_interfaces",
)
_FIXED = "the number of ranks is fixed: leave it out"
_THIS_MACHINE = "the ranks run on this machine: leave it out"
_REFUSED = {
    **dict.fromkeys(("min_num_proc", "max_num_proc", "min_np", "max_np"), _FIXED),
    **dict.fromkeys(("slots", "reset_limit"), _FIXED),
    "cooldown_range": "hosts are never excluded: leave it out",
    "host_discovery_script": "the hosts are fixed: leave it out",
    **dict.fromkeys(("hostfile", "ssh_port", "ssh_identity_file"), _THIS_MACHINE),
    "mpi_args": "set OMPI_MCA_… or MPICH's variables in the environment",
    "output_filename": "every rank has a log; see allranks.Cluster.log_dir",
    "executable": "the ranks run this Python: start the notebook with the other one",
}


class NotebookAlias(NotebookFeature):
    """Lets ``import horovod`` find allranks as long as the extension is loaded."""

    run_arguments = (
        *map(RunArgument, _IGNORED),
        *(RunArgument(name, instead) for name, instead in _REFUSED.items()),
    )

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
