"""Who knows ipyparallel finds the ranks by the ids of its engines."""

import os
from pathlib import Path

import allranks
from allranks.cluster import connection


def test_engine_ids_are_ranks_and_the_variables_are_shared():
    with allranks.Cluster(3) as cluster:
        pids = cluster.run("import os\nkept = 10 * rank\nos.getpid()")
        client = cluster.client()
        assert client.ids == [0, 1, 2]
        assert client[:].apply_sync(os.getpid) == list(pids)
        assert client[:].pull("kept", block=True) == [0, 10, 20]
        client[:].push({"pushed": "by ipyparallel"})
        assert client[:].pull("pushed", block=True) == 3 * ["by ipyparallel"]
        assert cluster.pull("pushed") == dict.fromkeys(range(3), "by ipyparallel")
        assert cluster.client() is client


def test_the_client_of_ranks_that_are_gone_is_not_handed_out_again():
    cluster = allranks.Cluster(2).start()
    first = cluster.client()
    cluster.stop()
    cluster.start()
    try:
        assert cluster.client() is not first
        assert cluster.client().ids == [0, 1]
    finally:
        cluster.stop()


def test_a_client_that_was_closed_is_not_handed_out_again():
    with allranks.Cluster(2) as cluster:
        with cluster.client() as first:
            assert first[:].apply_sync(abs, -3) == [3, 3]
        assert cluster.client()[:].apply_sync(abs, -4) == [4, 4]
        assert cluster.client() is not first


def test_many_ranks_have_no_controller_until_somebody_asks_for_a_client(monkeypatch):
    monkeypatch.setattr(connection, "CLIENTS_RANKS", 1)
    with allranks.Cluster(2) as cluster:
        cluster.run("pass")
        log = Path(cluster.log_dir) / "controller.log"
        assert not log.exists()
        assert cluster.client().ids == [0, 1]
        assert log.exists()
