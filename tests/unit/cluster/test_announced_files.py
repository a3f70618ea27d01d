"""How the files by which ipyparallel's tools find the ranks are written, and swept."""

import json
import tempfile

import pytest

from allranks.cluster import folders
from allranks.cluster.folders import ConnectionFiles, _set_name

NO_PROCESS = 2**22  # above the largest that Linux gives


@pytest.fixture
def security(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    folder = tmp_path / "profile_default" / "security"
    folder.mkdir(parents=True)
    return folder


def names(security):
    return sorted(path.name for path in security.iterdir())


class Watched(dict):
    """What is written: notes which files are there while it is."""

    def __init__(self, security):
        super().__init__(key="secret")
        self.security, self.seen = security, []

    def items(self):
        self.seen += self.security.glob("*.json")
        return super().items()


def test_a_file_is_whole_as_soon_as_it_has_its_name(security):
    files, client = ConnectionFiles(4), Watched(security)
    files.write(client, {}, None)
    assert client.seen == []
    assert json.loads((security / "ipcontroller-client.json").read_text()) == {"key": "secret"}
    assert len(names(security)) == 3
    files.close()
    assert names(security) == []


@pytest.mark.parametrize(
    "found",
    [
        {"engines": {"sets": {_set_name(): {"pid": NO_PROCESS}}}},
        {"engines": {"sets": {_set_name(): {"pid": "none"}}}},
        {"engines": {"sets": {_set_name(): {"pid": 10**30}}}},
        {"engines": []},
    ],
)
def test_whatever_a_file_of_another_cluster_says_the_files_are_written(security, found):
    (security / "cluster-other.json").write_text(json.dumps(found))
    files = ConnectionFiles(4)
    files.write({}, {}, None)
    assert "cluster-.json" in names(security)
    files.close()
    gone = found["engines"] and found["engines"]["sets"][_set_name()]["pid"] == NO_PROCESS
    assert names(security) == ([] if gone else ["cluster-other.json"])


def test_where_there_is_no_home_no_temporary_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.delenv("IPYTHONDIR", raising=False)
    monkeypatch.setenv("HOME", "/nowhere/home")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = ConnectionFiles(4)
    files.write({}, {}, None)
    files.close()
    assert folders.slurm_settings() == folders.SlurmSettings()
    assert names(tmp_path) == []
