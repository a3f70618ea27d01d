"""Which ranks ``ipp.Client(…)`` connects to."""

import json
import re
import signal
import socket
import subprocess
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from ipyparallel.client.client import Client

from allranks.cluster import cluster
from allranks.cluster.features import ClusterContext
from allranks.errors import UsageError
from allranks.features.ipyparallel import client_requests, notebook
from allranks.features.ipyparallel.clients import RankClients
from allranks.features.ipyparallel.connection_files import (
    ConnectionFiles,
    _set_name,
    connection_files,
)
from allranks.features.ipyparallel.metadata import REQUESTS
from allranks.features.ipyparallel.notebook import ClientPatch, NotebookClients
from allranks.magics import hints
from allranks.records.agent import Again, AgentExit, Controller, ControllerExit, Registered

FILE = "ipcontroller-client.json"
OWN = {"of": "this notebook", "key": "ours"}
THEIRS = {"key": "theirs", "allranks_notebook": "/course/lab.ipynb"}
CHOICES = [
    {},
    {"profile": "default"},
    {"profile_dir": "~/profile_default"},
    {"profile": "default", "ipython_dir": "{home}"},
]


@pytest.fixture
def security(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "profile_default" / "security"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def connected(monkeypatch):
    """What each client was made with, in place of a connection."""
    made = []

    def connect(client, info=None, **options):
        made.append((info, options))
        if isinstance(info, str):
            info = json.loads(Path(info).read_text())
        client._config = info or (THEIRS if "cluster_id" in options else {})

    monkeypatch.setattr(Client, "__init__", connect)
    monkeypatch.setattr(Client, "__del__", lambda client: None)
    return made


@pytest.fixture
def followed():
    """A client of these ranks that is not connected."""
    loop = SimpleNamespace(add_callback=lambda *call: None, stop=None)
    made = Client.__new__(Client)
    made._config, made._io_loop, made._task_stream = {"key": "ours"}, loop, SimpleNamespace()
    client_requests.follow(made)
    yield made
    made._closed = True


@pytest.fixture
def _no_cluster_starts(monkeypatch):
    """Tests beside this one may start some."""
    monkeypatch.setattr(notebook, "a_cluster_may_start", lambda: False)


@pytest.fixture
def other_notebook(security):
    files = ConnectionFiles(4)
    files.write(THEIRS, {}, None)
    yield security / FILE
    files.close()


@pytest.fixture(params=CHOICES, ids=lambda options: " ".join(options) or "nothing")
def options(request, tmp_path):
    return {name: text.format(home=tmp_path) for name, text in request.param.items()}


def client(ranks, *given, **options):
    hooks = SimpleNamespace(command=lambda name: OWN)
    running = SimpleNamespace(connection_information=lambda: OWN)
    running.cells = SimpleNamespace(hooks=hooks)
    with ExitStack() as undo, pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "session", SimpleNamespace(running=running if ranks else None))
        ClientPatch(undo)
        return Client(*given, **options)


def test_it_is_not_another_notebooks_unless_its_file_is_named(other_notebook, connected, options):
    with pytest.raises(UsageError, match="expected ranks of this notebook, found none") as found:
        client(False, **options)
    line = f"  ipp.Client({str(other_notebook)!r})  4 ranks of /course/lab.ipynb"
    assert line in str(found.value)
    client(False, str(other_notebook))
    client(False, **options, cluster_id="allranks-1-1")
    assert connected == [
        (str(other_notebook), {}),
        (None, options | {"cluster_id": "allranks-1-1"}),
    ]


def test_it_is_this_notebooks_also_where_another_has_the_file(other_notebook, connected, options):
    client(True, **options)
    assert connected == [(OWN, options)]


def test_a_cluster_of_plain_ipyparallel_is_found_by_its_profile(security, connected, options):
    (security / FILE).write_text("{}")
    (security / "cluster-.json").write_text(json.dumps({"engines": {"sets": {"1": {"n": 2}}}}))
    files = ConnectionFiles(4)
    files.write({}, {}, None)
    client(False, **options)
    client(True, **options)
    read = {"cluster": object(), "profile_dir": str(security.parent)}
    client(True, {"of": "ipyparallel"}, **read)
    files.close()
    assert connected.pop() == ({"of": "ipyparallel"}, read)
    # Without arguments, the ranks of this notebook come first.
    assert connected == [(None, options), (None if options else OWN, options)]


def test_a_notebook_on_another_host_of_the_same_home_is_another_notebook(security, connected):
    sets = {_set_name() + "-2": {"n": 3, "pid": 1}}
    (security / FILE).write_text("{}")
    (security / "cluster-.json").write_text(json.dumps({"engines": {"sets": sets}}))
    with pytest.raises(UsageError, match=r"3 ranks on .*-2"):
        client(False, profile="default")
    assert connected == []
    assert connection_files(security.parent, only_here=True) == {}


def test_where_a_cluster_was_read_from_a_file_it_is_said_whose_ranks_these_are(
    other_notebook, connected, capsys
):
    read = {"cluster": object(), "profile_dir": str(other_notebook.parents[1])}
    client(False, THEIRS, **read)
    assert capsys.readouterr().err == (
        "The client has the ranks of /course/lab.ipynb. For ranks of this notebook, type: "
        "%distributed start   and make the client again\n"
    )
    client(True, THEIRS, **read)
    said = "The client has the ranks of this notebook, not those of /course/lab.ipynb\n"
    assert capsys.readouterr().err == said
    client(True, OWN | {"allranks_notebook": "/mine.ipynb"}, **read)
    assert capsys.readouterr().err == ""
    assert [info for info, _ in connected] == [THEIRS, OWN, OWN]


@pytest.mark.parametrize("ranks", [False, True], ids=["without ranks", "with ranks"])
@pytest.mark.usefixtures("connected")
def test_whose_ranks_are_at_a_chosen_file_is_said(other_notebook, capsys, ranks):
    read = {"cluster": object(), "cluster_id": "allranks-1-1"}
    client(ranks, str(other_notebook))
    client(ranks, THEIRS)
    client(ranks, THEIRS, **read)
    assert capsys.readouterr().err == 3 * "The client has the ranks of /course/lab.ipynb\n"
    own = OWN | {"allranks_notebook": "/mine.ipynb"}
    other_notebook.write_text(json.dumps(own))  # it had another name before
    client(True, str(other_notebook))
    assert capsys.readouterr().err == "The client has the ranks of this notebook\n"


SECOND = "allranks-1-1"
FOUND_BY = {
    "its file": lambda folder: ((f"{folder}/{FILE}",), {}),
    "the name of its cluster": lambda folder: ((), {"cluster_id": SECOND}),
    "a profile": lambda folder: ((), {"cluster_id": SECOND, "profile_dir": str(folder.parent)}),
    "a cluster": lambda folder: ((THEIRS,), {"cluster": object(), "profile_dir": folder.parent}),
    "a second cluster": lambda folder: ((THEIRS,), {"cluster": object(), "cluster_id": SECOND}),
}


@pytest.mark.parametrize("name", FOUND_BY)
@pytest.mark.usefixtures("connected")
def test_a_client_of_another_notebooks_ranks_ends_with_them_however_it_has_found_them(
    other_notebook, monkeypatch, name
):
    visits = []
    monkeypatch.setattr(client_requests, "visit", lambda _, file: visits.append(file.name))
    given, options = FOUND_BY[name](other_notebook.parent)
    client(False, *given, **options)
    assert visits == [f"ipcontroller-{SECOND}-client.json" if "cluster_id" in options else FILE]


@pytest.mark.parametrize("name", [FILE, "ipcontroller-allranks-17-1-client.json"])
def test_a_chosen_file_of_ranks_that_does_not_exist_says_what_to_type(security, connected, name):
    said = "found no file: they have ended, or have yet to start. To start those of a notebook"
    with pytest.raises(UsageError, match=said) as found:
        client(False, str(security / name))
    assert "\n" not in str(found.value)
    assert isinstance(found.value, OSError)  # as ipyparallel's: programs try again then
    files = ConnectionFiles(4)
    files.write(THEIRS, {}, None)
    with pytest.raises(UsageError, match=r"4 ranks of /course/lab\.ipynb$"):
        client(False, str(security / "ipcontroller-allranks-99-1-client.json"))
    files.close()
    assert connected == []


def controller_file(security, place):
    address, port = place.getsockname()
    about = {"location": socket.gethostname(), "interface": f"tcp://{address}"}
    (security / FILE).write_text(json.dumps(about | {"registration": port, "ssh": ""}))


@pytest.mark.usefixtures("_no_cluster_starts")
@pytest.mark.parametrize("left", [False, True], ids=["no file", "the file of a killed controller"])
def test_where_no_cluster_runs_it_says_at_once_what_to_type(security, connected, options, left):
    if left:
        with socket.create_server(("127.0.0.1", 0)) as place:
            controller_file(security, place)
    with pytest.raises(UsageError, match=r"found neither\. Type: %distributed start"):
        client(False, **options)
    client(False, **options, timeout=5)
    client(True, **options)
    assert connected == [(None, options | {"timeout": 5}), (OWN, options)]


@pytest.mark.parametrize("program", ["ipcluster", "ipyparallel.controller"])
def test_a_cluster_that_someone_starts_is_waited_for(security, connected, program):
    with subprocess.Popen([program], executable="/bin/cat", stdin=subprocess.PIPE):
        client(False)
    assert connected == [(None, {})]


def test_a_controller_that_listens_is_asked(security, connected, options):
    with socket.create_server(("127.0.0.1", 0)) as place:
        controller_file(security, place)
        client(False, **options)
    assert connected == [(None, options)]


def test_a_profile_without_a_cluster_is_that_of_the_ranks(security, connected):
    client(True, profile="mpi")
    assert connected == [(OWN, {"profile": "mpi"})]


def hears(ranks):
    """Returns what passes an event of a host agent on to those that listen for it."""
    return lambda event, pid: [one(event, pid) for one in ranks.listeners.get(type(event), ())]


def test_who_asks_for_a_client_learns_that_the_controller_has_ended():
    ranks = ClusterContext(2, lambda *_: None, starts_ranks=True, log_dir="/logs")
    clients = RankClients(ranks)
    hears(ranks)(ControllerExit(-9), None)
    with pytest.raises(UsageError, match=r"it was killed by signal 9.*controller\.log"):
        clients.client()
    ranks.at_end.close()


ENDS = {
    "a stop": (lambda ranks, hear: ranks.at_end.close(), "they have ended"),
    "the agent's death": (lambda ranks, hear: hear(AgentExit(-9), None), "they have ended"),
    "another start": (lambda ranks, hear: hear(Again(), None), "they have ended"),
    "the controller's death": (
        lambda ranks, hear: hear(ControllerExit(-9), None),
        "it was killed by signal 9",
    ),
}


@pytest.mark.parametrize(("end", "why"), ENDS.values(), ids=ENDS.keys())
def test_clients_end_with_their_ranks_and_say_why(followed, end, why):
    ranks = ClusterContext(2, lambda *_: None, starts_ranks=True)
    RankClients(ranks)
    hear = hears(ranks)
    hear(Controller({"key": "ours"}, {}), None)
    end(ranks, hear)
    with pytest.raises(UsageError, match=why):
        followed._send()
    assert followed._closed


ADVICE = [
    (None, "Type first: %distributed start   Then type: rc = ipp.Client()   and make"),
    ("other ranks", "Type: rc = ipp.Client()   and make"),
]


@pytest.mark.parametrize(("running", "says"), ADVICE, ids=["none", "others"])
def test_a_client_without_ranks_says_what_to_type_now(monkeypatch, followed, running, says):
    ranks = ClusterContext(2, lambda *_: None, starts_ranks=True)
    RankClients(ranks)
    hear = hears(ranks)
    hear(Controller({"key": "ours"}, {}), None)
    ranks.at_end.close()
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=running))
    with pytest.raises(UsageError, match=re.escape(f"ended. {says} its views again")):
        followed._send()


def test_a_client_outlives_that_another_notebook_has_its_ranks(followed):
    ranks = ClusterContext(2, lambda *_: None, starts_ranks=True)
    RankClients(ranks)
    hear = hears(ranks)
    hear(Controller({"key": "ours"}, {}), None)
    ranks.roster.set_phase("stopped", "another notebook has them")
    ranks.at_end.close()
    assert not followed._closed


def plain_calls(monkeypatch, method):
    """What is called of ipyparallel's own method, and of the ranks of the notebook."""
    calls = []
    hooks = SimpleNamespace(command=lambda name: {"key": "ours"})
    running = SimpleNamespace(
        size=2,
        stop=lambda: calls.append("stopped"),
        cells=SimpleNamespace(hooks=hooks),
    )
    plain = lambda client, *call, **more: calls.append((call, more))  # noqa: E731
    monkeypatch.setattr(Client, method, plain)
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=running))
    return calls


def test_a_client_interrupts_a_cell_in_the_background_only_for_its_user(monkeypatch, followed):
    calls = plain_calls(monkeypatch, "send_signal")
    cell = SimpleNamespace(interrupt=lambda: calls.append("interrupted"))
    monkeypatch.setattr(notebook, "in_background", lambda ranks: [cell])
    with ExitStack() as undo:
        ClientPatch(undo)
        monkeypatch.setattr(
            Client, "_send_control_request", lambda *call, block: calls.append(call[1:])
        )
        client_requests.interrupt(followed, 1, {"request"})
        followed.send_signal("SIGUSR1")
        followed.send_signal(signal.SIGINT, targets=0)
    assert calls == [
        ([1], "signal_request", {"sig": "SIGINT", REQUESTS: ["request"]}),
        (("SIGUSR1",), {"targets": None, "block": None}),
        "interrupted",
        ((signal.SIGINT,), {"targets": 0, "block": None}),
    ]


@pytest.mark.parametrize("sig", ["SIGKILL", signal.SIGKILL])
@pytest.mark.parametrize(("targets", "ended"), [(None, [0, 1]), ("all", [0, 1]), (1, [1])])
def test_sigkill_ends_ranks_by_their_host_agents(monkeypatch, followed, sig, targets, ended):
    calls = plain_calls(monkeypatch, "send_signal")
    running = cluster.session.running
    running.hellos = {rank: SimpleNamespace(engine=f"engine-{rank}") for rank in range(2)}
    running.cells.connection = SimpleNamespace(end_rank=lambda rank, why: calls.append(rank))
    followed._update_engines({0: "engine-0", 1: "engine-1"})
    with ExitStack() as undo:
        ClientPatch(undo)
        assert followed.send_signal(sig, targets).done()
        followed._config = {"key": "others'"}
        followed.send_signal(sig, targets, block=True)
    assert calls == [*ended, ((sig,), {"targets": targets, "block": True})]


SHUTDOWNS = [
    ({"hub": True}, ["stopped"]),
    ({"targets": "all"}, ["stopped"]),
    ({"targets": [0, 1], "block": True}, ["stopped"]),
    ({"targets": 1, "block": True}, [((1, False, False), {"block": True})]),
]


@pytest.mark.parametrize(("options", "does"), SHUTDOWNS, ids=str)
def test_a_client_that_is_to_end_all_engines_stops_the_ranks(monkeypatch, followed, options, does):
    calls = []
    hooks = SimpleNamespace(command=lambda name: {"key": "ours"})
    running = SimpleNamespace(
        size=2, stop=lambda: calls.append("stopped"), cells=SimpleNamespace(hooks=hooks)
    )
    monkeypatch.setattr(
        Client, "shutdown", lambda client, *call, **more: calls.append((call, more))
    )
    monkeypatch.setattr(cluster, "session", SimpleNamespace(running=running))
    followed._update_engines({0: "engine-0", 1: "engine-1"})
    with ExitStack() as undo:
        ClientPatch(undo)
        followed.shutdown(**options)
        followed._config = {"key": "others'"}
        followed.shutdown(hub=True)
    assert calls == [*does, (("all", False, True), {})]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_client_says_what_a_replaced_rank_may_have_lost(monkeypatch, followed, rank):
    plain_calls(monkeypatch, "send_signal")
    cluster.session.running.roster = SimpleNamespace(replaced=(1,))
    content = {"ename": "NameError", "evalue": "name 'model' is not defined"}
    content |= {"traceback": ["NameError"], "engine_info": {"engine_id": rank}}
    with ExitStack() as undo:
        ClientPatch(undo)
        said = followed._unwrap_exception(content).traceback
    lost = "rank 1 was replaced, and lacks what cells had made before. If a cell made model then, "
    assert said == ("NameError" if rank == 0 else f"NameError\n\n{lost}run it again.")


def test_a_client_says_which_name_exists_in_the_notebook(monkeypatch, followed):
    plain_calls(monkeypatch, "send_signal")
    cluster.session.running.roster = SimpleNamespace(replaced=())
    shell = SimpleNamespace(user_ns={"model": 3, "In": []}, user_ns_hidden={})
    shell.user_ns_hidden["In"] = shell.user_ns["In"]
    monkeypatch.setattr(notebook, "get_ipython", lambda: shell)
    said = []
    with ExitStack() as undo:
        ClientPatch(undo)
        for name, key in (("model", "ours"), ("In", "ours"), ("model", "others'")):
            content = {"ename": "NameError", "evalue": f"name '{name}' is not defined"}
            content |= {"traceback": ["NameError"], "engine_info": {"engine_id": 1}}
            followed._config = {"key": key}
            said.append(followed._unwrap_exception(content).traceback)
    copy = "model exists in the notebook. To copy it to the ranks: %distributed push model"
    assert said == [f"NameError\n\n{copy}", "NameError", "NameError"]


def test_a_value_that_many_ranks_lack_is_looked_at_once(monkeypatch, followed):
    plain_calls(monkeypatch, "send_signal")
    cluster.session.running.roster = SimpleNamespace(replaced=())
    shell, looks = SimpleNamespace(user_ns={"data": [1]}, user_ns_hidden={}), []
    monkeypatch.setattr(notebook, "get_ipython", lambda: shell)
    monkeypatch.setattr(hints, "sent_nbytes", lambda value: looks.append(value) or 3)
    said = set()
    with ExitStack() as undo:
        ClientPatch(undo)
        for value, ranks in (([1], range(8)), ([2], range(8))):
            shell.user_ns["data"] = value
            for rank in ranks:
                content = {"ename": "NameError", "evalue": "name 'data' is not defined"}
                content |= {"traceback": [""], "engine_info": {"engine_id": rank}}
                said.add(followed._unwrap_exception(content).traceback)
    assert looks == [[1], [2]]
    (line,) = said
    assert line.endswith(
        "data exists in the notebook. To copy it to the ranks: %distributed push data"
    )


class Registrations(list):
    """What a client calls when engines register; the one that is awaited does so at once."""

    def __init__(self, register):
        self.register = register

    def append(self, callback):
        super().append(callback)
        self.register()


def test_a_cell_that_replaced_a_rank_ends_when_the_clients_know_the_new_engine(
    monkeypatch, followed
):
    plain_calls(monkeypatch, "send_signal")
    ranks = cluster.session.running
    hellos = {rank: SimpleNamespace(engine=f"{rank} of process 2") for rank in range(2)}
    ranks.roster = SimpleNamespace(caller=0, dead={}, replaced=(), hellos=hellos)

    def replace(tell):
        ranks.roster.replaced = (1,)
        return True

    ranks.cells.is_up, ranks.cells.connection = replace, SimpleNamespace(deaths=0)
    ranks.cells.turns = SimpleNamespace(taken_if_free=lambda: nullcontext(True))
    registered = {"content": {"id": 1, "uuid": hellos[1].engine}}
    followed._registration_callbacks = []
    followed._trait_values["_registration_callbacks"] = Registrations(
        lambda: followed._register_engine(registered)
    )
    notebook._replace_dead(None)
    assert followed._engines[1] == hellos[1].engine
    assert followed._registration_callbacks == []


def test_files_name_the_notebook_are_removed_at_the_end_and_not_written_after_it(
    security, monkeypatch
):
    monkeypatch.setenv("JPY_SESSION_NAME", "/course/lab.ipynb")
    ranks = ClusterContext(2, lambda *_: None, starts_ranks=True)
    RankClients(ranks)
    hear = hears(ranks)
    hear(Registered({"of": "this notebook"}, {}), None)
    named = {"of": "this notebook", "allranks_notebook": "/course/lab.ipynb"}
    assert json.loads((security / FILE).read_text()) == named
    ranks.at_end.close()
    hear(Registered({"of": "this notebook"}, {}), None)
    assert list(security.iterdir()) == []


def test_without_the_extension_ipyparallels_client_is_its_own():
    plain = Client.__init__
    calls = []
    events = SimpleNamespace(
        register=lambda *call: calls.append(call), unregister=lambda *call: calls.remove(call)
    )
    magics = SimpleNamespace(registry={})
    with ExitStack() as undo:
        NotebookClients.loaded(SimpleNamespace(magics_manager=magics, events=events), undo)
        assert Client.__init__ is not plain
        assert calls
    assert calls == []
    assert Client.__init__ is plain


@pytest.mark.parametrize("left", [(), (1,)])
def test_an_interrupt_of_a_cell_ends_the_request_of_a_rank_that_has_left_the_cell_since(
    monkeypatch, left
):
    ended, cell = [], SimpleNamespace(shown=True, pending=lambda: (1,), interrupts=lambda: 0)
    cell.number, cell.ranks = 3, (0, 1)
    cell.poll = lambda look: setattr(cell, "look", look)
    monkeypatch.setattr(client_requests, "interrupt_running", lambda *of: ended.append(of))
    feature = NotebookClients()
    feature.cell = cell
    feature.started(ClusterContext(2, lambda *_: None, starts_ranks=True))
    feature._roster = SimpleNamespace(hellos={1: SimpleNamespace(engine="engine-1")})
    feature.cell_lasts()
    cell.look()
    cell.pending, cell.interrupts = lambda: left, lambda: 1
    cell.look()
    cell.look()
    assert ended == [(["engine-1"], 3)]
