"""What stands behind ``--on``: how it is read, what is refused, and what is listed."""

import os
import re
import sys
import tempfile

import pytest

from allranks import Cluster
from allranks.cluster import devices, launchers
from allranks.cluster.launchers import addresses, pbs_lsf, ray_dask, registry, slurm
from allranks.cluster.launchers.batch import parse_batch
from allranks.cluster.launchers.command import SshLauncher
from allranks.cluster.launchers.job import Host
from allranks.cluster.launchers.launcher import LocalLauncher
from allranks.cluster.launchers.registry import SITES
from allranks.cluster.options import ClusterOptions
from allranks.engine import libraries
from allranks.errors import ClusterLost, MissingDependency, StartFailed, UsageError
from allranks.magics.options import parse_cell, parse_command
from allranks.records.config import LEASE, MAX_RANKS, lease_seconds
from tests.missing import skip_missing

SITE = """
[pair]
on = "ssh:h1:2,h2:2"
about = "the two machines under the desk"
environment = { NCCL_SOCKET_IFNAME = "ib0" }
[gpu-node]
on = "slurm --partition gpu --gpus-per-node 4"
"""


@pytest.fixture
def sites(tmp_path, monkeypatch):
    path = tmp_path / "allranks.toml"
    path.write_text(SITE)
    monkeypatch.setenv(SITES, str(path))
    return path


@pytest.fixture
def _slurm_here(tmp_path, monkeypatch):
    for name in ("sbatch", "qsub"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_a_named_place_is_what_its_file_says_and_what_is_built_in_needs_none(sites):
    made = launchers.named("pair")
    assert isinstance(made, SshLauncher)
    assert made.size(None) == 4
    assert made.environment()["NCCL_SOCKET_IFNAME"] == "ib0"
    sites.write_text("[pair")
    assert isinstance(launchers.named("local"), LocalLauncher)
    assert isinstance(launchers.named("ssh:h1:2"), SshLauncher)
    assert Cluster(2).launcher.name == "local"
    with pytest.raises(ClusterLost, match=r"Call its method start\(\) first"):
        Cluster(2).run("rank")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pair", "expected named places in"),
        ("[pair]\nwhere = 'x'", "expected a table for every place"),
        ("[pair]\non = 'local'\ncolour = 'red'", "found colour = 'red'"),
        ("[slurm]\non = 'slurm --nodes 2'", "found .slurm., which is a launcher's"),
        ("[pods]\nreach = 'kubectl exec'", "expected {host} in reach under .pods."),
        ("[pods]\nreach = 'x {host}'\non = 'local'", "with on or reach, found pods"),
    ],
)
def test_a_file_of_places_that_cannot_be_read_is_named(sites, text, said):
    sites.write_text(text)
    with pytest.raises(UsageError, match=said):
        launchers.named("pair")


REACHES = """
[pods]
reach = "cat - {host}"
about = "pods of a cluster"
environment = { NCCL_SOCKET_IFNAME = "eth0", OMP_NUM_THREADS = 4 }
[training]
on = "pods:ranks-0:4,ranks-1:4"
environment = { NCCL_SOCKET_IFNAME = "ib0" }
"""


def test_a_command_that_reaches_hosts_is_a_launcher(sites, monkeypatch):
    sites.write_text(REACHES)
    made = launchers.named("training")
    assert (made.name, made.typed, made.size(None)) == ("pods", "pods:ranks-0:4,ranks-1:4", 8)
    variables = made.environment()
    assert (variables["NCCL_SOCKET_IFNAME"], variables["OMP_NUM_THREADS"]) == ("ib0", "4")
    assert launchers.named("pods:ranks-0").environment()["NCCL_SOCKET_IFNAME"] == "eth0"
    text = registry.text()
    assert "pods       --on pods:HOST:2,HOST:2  pods of a cluster" in text
    with pytest.raises(UsageError, match="--on pods:HOST:2,HOST:2"):
        launchers.named("pods")  # without hosts
    monkeypatch.setenv("PATH", "/nowhere")
    text = registry.text()
    assert "expected cat, by which --on pods reaches hosts, found no such program. Inst" in text


def test_no_launcher_starts_more_ranks_than_the_administrator_allows(monkeypatch):
    monkeypatch.setenv(MAX_RANKS, "1")
    assert Cluster().size == 1
    said = (
        r"expected at most 1 ranks, as ALLRANKS_MAX_RANKS allows here, found 2\. Type for example"
    )
    for asked in ({"n": 2}, {"launcher": "ssh:h1:1,h2:1"}):
        with pytest.raises(UsageError, match=said):
            Cluster(**asked)
    monkeypatch.setenv(MAX_RANKS, "all")
    with pytest.raises(UsageError, match="ALLRANKS_MAX_RANKS to be a number of ranks, 1 or more"):
        Cluster()


def test_dask_and_ray_without_their_package_or_address_say_what_to_type(monkeypatch):
    with pytest.raises(UsageError, match="--on dask:tcp://h1:8786, --on ray"):
        launchers.named("dask")
    monkeypatch.setattr(ray_dask.importlib.util, "find_spec", lambda package: None)
    for name in ("dask:tcp://h1:8786", "ray", "ray://h1:10001"):
        remedy = f'Type: pip install "allranks[{name[:4].rstrip(":")}]"'
        with pytest.raises(MissingDependency, match=re.escape(remedy)):
            launchers.named(name)
    assert 'pip install "allranks[dask]"' in registry.text()


@pytest.fixture
def nobody(sites, monkeypatch):
    """This process may read nothing of root's, nor the folders of the tests."""
    if os.geteuid() != 0:
        skip_missing("root alone can be somebody else: run as root")
    monkeypatch.setenv("IPYTHONDIR", tempfile.gettempdir())
    os.seteuid(65534)
    yield
    os.seteuid(0)


@pytest.mark.usefixtures("nobody")
def test_a_file_of_places_that_this_user_may_not_read_is_passed_over_and_named(sites):
    assert launchers.takes_options("pair") is True
    with pytest.raises(UsageError) as refused:
        launchers.named("pair --nodes 2")
    assert str(refused.value).startswith("expected a launcher, found 'pair --nodes 2'. Available:")
    assert str(refused.value).endswith(f"\n{sites} was not read: permission denied")
    assert registry.text().endswith(f"\n  {sites} was not read: permission denied")


def test_the_options_of_a_batch_system_go_with_its_name_and_others_have_none(sites):
    cell = parse_cell("--on slurm --nodes 2 --ntasks-per-node 4 -r 0 --time '1:00:00'")
    assert cell.cluster.launcher == "slurm --nodes 2 --ntasks-per-node 4 --time 1:00:00"
    assert cell.ranks == "0"
    _, start = parse_command("start --on gpu-node --nodes 2")
    assert start.cluster.launcher == "gpu-node --nodes 2"
    for line in ("--nodes 2", "--on local --nodes 2", "--on ssh:h1 --nodes 2"):
        with pytest.raises(UsageError, match="unrecognized arguments: --nodes 2"):
            parse_cell(line)


@pytest.mark.usefixtures("_slurm_here")
def test_a_batch_system_is_asked_for_as_many_ranks_as_its_options_say(ipython):
    assert slurm.SlurmLauncher(options=["--nodes", "2", "--ntasks-per-node", "4"]).size(None) == 8
    assert slurm.SlurmLauncher(options=["-N", "3"]).size(6) == 6
    with pytest.raises(
        UsageError, match=r"expected the same number of ranks on each of 3 hosts, found 7"
    ):
        slurm.SlurmLauncher(options=["-N", "3"]).size(7)
    with pytest.raises(UsageError, match="found -n 6"):
        pbs_lsf.PbsLauncher(options=["--nodes", "2", "--ntasks-per-node", "4"]).size(6)
    # The options that are typed come after those of ipyparallel's profile.
    (ipython / "ipcluster_config.py").write_text("c.SlurmLauncher.options = '--nodes 2 --mem 1G'")
    made = slurm.SlurmLauncher(options=["--nodes", "3", "--mem", "2G"])
    assert made.size(None) == 3
    assert made._asked.more == ["--mem", "1G", "--mem", "2G"]


PROFILE = """
c.BatchSystemLauncher.queue = "gpu"
c.SlurmLauncher.account = "physics"
c.SlurmEngineSetLauncher.options = "--constraint={kind} --mem 4G"
c.SlurmEngineSetLauncher.namespace = {"kind": "a100"}
c.SlurmLauncher.submit_command = ["site-sbatch", "--wait-less"]
c.SlurmLauncher.delete_command = ["site-cancel"]
c.SlurmLauncher.job_id_regexp = r"job (\\d+)"
c.SlurmLauncher.job_id_regexp_group = 1
c.SlurmEngineSetLauncher.batch_template = "one that would start engines"
"""


@pytest.fixture
def ipython(tmp_path, monkeypatch):
    folder = tmp_path / "ipython" / "profile_default"
    folder.mkdir(parents=True)
    monkeypatch.setenv("IPYTHONDIR", str(folder.parent))
    return folder


def test_what_a_profile_of_ipyparallel_says_of_slurm_is_honoured(ipython):
    assert slurm.slurm_settings() == slurm.SlurmSettings()
    (ipython / "ipcluster_config.py").write_text(PROFILE)
    found = slurm.slurm_settings()
    assert found.options == (
        "--partition=gpu",
        "--account=physics",
        "--constraint=a100",
        "--mem",
        "4G",
    )
    assert (found.submit, found.delete) == (("site-sbatch", "--wait-less"), ("site-cancel",))
    assert found.job_id.search("queued: job 4711 of 2")[found.group] == "4711"
    (ipython / "ipcluster_config.py").write_text("c.SlurmLauncher.queue = 1 / 0")
    with pytest.raises(UsageError, match=r"in .*ipcluster_config.py, found ZeroDivisionError"):
        slurm.slurm_settings()


def test_settings_of_the_environment_reach_other_hosts_and_jobs_of_several_nodes(monkeypatch):
    made = launchers.named("ssh:h1:2,h2:2")
    needed = {*made.environment(), "OPAL_PREFIX", "MPI4PY_LIBMPI"}
    assert {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "PRTE_ALLOW_RUN_AS_ROOT"} <= needed
    for name in needed:
        monkeypatch.setenv(name, "the user's")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "7")  # of a job that the notebook runs in
    found = made.environment()
    assert {name for name in needed if found.get(name) != "the user's"} == set()
    assert "OMPI_COMM_WORLD_RANK" not in found
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    assert launchers.default() == "local"
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert launchers.default() == "slurm"
    assert slurm._tasks_per_node({"SLURM_TASKS_PER_NODE": "4(x2),1"}) == [4, 4, 1]


def test_the_names_of_hosts_are_read_as_batch_systems_and_users_write_them():
    assert pbs_lsf._pbs_hosts("n1/0*4+n2.cluster/1*4+n1/2") == ["n1", "n2"]
    assert pbs_lsf._lsf_hosts("4*n1:4*n2.cluster:n1") == ["n1", "n2"]
    made = launchers.named("ssh:me@h1:2,h2")
    assert isinstance(made, SshLauncher)
    assert made.hosts == (Host("h1", 2, login="me@h1"), Host("h2", 1, login="h2"))
    with pytest.raises(UsageError, match="expected each host once"):
        launchers.named("ssh:me@h1,you@h1")
    with pytest.raises(UsageError, match="Type for example: --on lsf"):
        parse_batch(["--nodes", "two"], "--on lsf")


def test_the_number_of_ranks_holds_on_the_same_hosts_and_ports_are_two_or_more(monkeypatch):
    here = ClusterOptions(n=4)
    assert ClusterOptions(gpus="none").over(here).n == 4
    assert ClusterOptions(launcher="local").over(here).n == 4
    assert ClusterOptions(launcher="ssh:h1:2").over(here).n is None
    assert ClusterOptions(n=2, launcher="ssh:h1:2").over(here).n == 2
    monkeypatch.setenv(addresses.PORTS, "50000-50100")
    assert addresses.ports() == (50000, 50100)
    monkeypatch.setenv(addresses.PORTS, "50000")
    with pytest.raises(UsageError, match="to be two ports or more"):
        addresses.ports()


@pytest.mark.parametrize("seconds", ["4", "251", "long"])
def test_a_lease_that_is_too_short_or_too_long_is_refused(monkeypatch, seconds):
    monkeypatch.setenv(LEASE, "120")
    assert lease_seconds() == 120
    monkeypatch.setenv(LEASE, seconds)
    with pytest.raises(UsageError, match=f"expected {LEASE} to be .*, found '{seconds}'"):
        lease_seconds()


def test_every_launcher_is_listed_with_why_it_cannot_be_used_here(sites, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    text = registry.text()
    assert text.startswith("→ local      ranks on this machine\n")
    assert "ssh        --on ssh:h1:2,h2:2" in text
    assert "not available: expected ssh, found none. Type: apt install openssh-client" in text
    assert "not available: expected sbatch, found no such program" in text
    assert f"pair       the two machines under the desk  ({sites})" in text


def test_the_gpus_of_other_hosts_are_known_by_their_numbers(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert libraries.visible_gpus() == ("2", "3")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert libraries.visible_gpus() == ()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert libraries.visible_gpus() == ("GPU-1", "GPU-2")
    assert devices.numbers(None) == devices.numbers("all") == ()
    assert devices.numbers("0, 2") == ("0", "2")
    with pytest.raises(UsageError, match="expected --gpus with numbers"):
        Cluster(launcher="ssh:h1:2", gpus="GPU-1")
    with pytest.raises(UsageError, match="--exclusive counts the GPUs of this machine"):
        Cluster(launcher="ssh:h1:2", exclusive=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the way that Linux chooses")
def test_the_address_is_the_one_on_the_way_to_a_host_that_not_only_ssh_knows(monkeypatch):
    assert addresses.address_towards("no.such.host.invalid", "localhost") == "127.0.0.1"
    with pytest.raises(StartFailed, match="expected a route to no"):
        addresses.address_towards("no.such.host.invalid")
    ways = {"here": "127.0.1.1", "there": "10.0.0.5"}
    monkeypatch.setattr(addresses, "_address_towards", ways.get)
    assert addresses.address_towards("here", "there") == "10.0.0.5"
    assert addresses.address_towards("here") == "127.0.1.1"
    ways["six"] = "fd77::5"  # a host without IPv4
    assert addresses.address_towards("there", "six") == "fd77::5"
    monkeypatch.setenv(addresses.ADDRESS, "10.1.2.3")
    assert addresses.address_towards("localhost") == "10.1.2.3"
