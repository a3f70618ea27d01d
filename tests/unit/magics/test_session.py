"""What commands say where no ranks run."""

from allranks.cluster.features import NotebookHooks
from allranks.magics.session import Session


def test_without_features_a_stop_without_ranks_says_so():
    assert Session(NotebookHooks(())).stop() == "No ranks are running."
