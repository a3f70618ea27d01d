"""The core names a feature, or its library, only where it has to work without the feature."""

import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "allranks"
FOLDERS = ("cluster", "collectives", "engine", "magics", "records", "widgets")
LIBRARIES = "ipyparallel|torch|jax|tensorflow|horovod"
REASONS = {
    "cluster/cluster.py": "Cluster.client() returns a client of ipyparallel",
    "cluster/doctor.py": "reports which libraries are installed",
    "cluster/launchers/slurm.py": "reads ipyparallel's settings of Slurm",
    "collectives/arrays/libraries.py": "arrays of each library are arguments of collectives",
    "collectives/arrays/reductions.py": "the reductions have Horovod's numbers",
    "collectives/arrays/torch_memory.py": "as arrays/libraries.py",
    "collectives/gpu/dlpack.py": "as arrays/libraries.py, on a GPU",
    "collectives/ops/buffers.py": "as arrays/libraries.py, in buffers of MPI",
    "collectives/ops/reducing.py": "refuses Horovod's argument average, in the place of op",
    "engine/libraries.py": "the same settings for ranks of notebooks and of scripts",
}
FEATURES = {
    "attach": {
        "cluster/launchers/launcher.py": "the name of a setting of Open MPI",
        "records/limits.py": "one table of all time limits, whose order a test checks",
    },
    "ensemble": {
        "records/wire.py": "several features read the record that starts a member of an ensemble",
    },
    "features.hosts": {},  # the hosts themselves are named in many files
    "heal": {
        "cluster/cluster.py": "Cluster.heal and heal_when are methods for users",
        "records/requests.py": "the name of a request, which the feature attach repeats",
    },
}


def files_that_name(words: str) -> set[str]:
    return {
        str(path.relative_to(CORE))
        for folder in FOLDERS
        for path in (CORE / folder).rglob("*.py")
        if re.search(words, path.read_text(), re.IGNORECASE)
    }


def test_the_core_names_a_library_only_for_a_reason():
    assert files_that_name(LIBRARIES) == set(REASONS)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_core_names_a_feature_only_for_a_reason(feature):
    assert files_that_name(feature) == set(FEATURES[feature])
