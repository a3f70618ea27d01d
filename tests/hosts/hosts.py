"""Several hosts on one machine, made of namespaces, and what runs on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Self

from tests.missing import skip_missing

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
_PACKAGES = {
    "ip": "iproute2",
    "unshare": "util-linux",
    "/usr/sbin/sshd": "openssh-server",
    "ssh": "openssh-client",
    "ps": "procps",
    "tcpdump": "tcpdump",
}
_SLURM_PACKAGES = {
    "/usr/sbin/slurmctld": "slurmctld",
    "/usr/sbin/slurmd": "slurmd",
    "sbatch": "slurm-client",
    "/usr/sbin/munged": "munge",
}
#: What every host runs by itself, and nothing else may be left of it.
_OWN = ("unshare", "bash", "sleep", "sshd", "munged", "slurmctld", "slurmd", "slurmscriptd")
#: Each set of hosts has names of its own on the machine.
_sets = count()
#: With what find lists a folder, though files vanish meanwhile.
_ITS_CONTENTS = ("-ignore_readdir_race", "-mindepth", "1", "-maxdepth", "1")


def missing(slurm: bool = False) -> str:
    """Why such hosts cannot be had here, and what to type; empty if they can."""
    packages = _PACKAGES | (_SLURM_PACKAGES if slurm else {})
    wanted = sorted({package for program, package in packages.items() if not shutil.which(program)})
    if wanted:
        return f"hosts of namespaces need Debian packages: apt-get install {' '.join(wanted)}"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True)
    if os.geteuid() != 0 or tried.returncode:
        return "hosts of namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN: run as root"
    return ""


def require(slurm: bool = False) -> None:
    """Skips the test where such hosts cannot be had, and says what to type."""
    if reason := missing(slurm):
        skip_missing(reason)


class Hosts:
    """Hosts ``h0``, ``h1`` …, each with an address, a hostname, and temporary files of its own.

    The repository and ``shared`` are seen by all of them at the same path.

    Args:
        count: how many.
        slurm: whether Slurm runs on them: ``h0`` logs in, the others compute.
        ipv6: whether they have addresses of IPv6 only, but for the loopback.
    """

    def __init__(self, count: int, slurm: bool = False, ipv6: bool = False) -> None:
        self.names = tuple(f"h{number}" for number in range(count))
        self._folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        self._folder.chmod(0o755)  # munge does not run as root
        self.shared = self._folder / "shared"
        self.shared.mkdir()
        self._script = HERE / ("slurm.sh" if slurm else "hosts.sh")
        self.prefix = f"a{os.getpid() % 100_000}x{next(_sets)}"
        self._net = {"HOSTS_NET": "fd77::"} if ipv6 else {}
        self._crashed: set[str] = set()
        self._cut: set[str] = set()
        self._frozen: set[str] = set()

    def __enter__(self) -> Self:
        self._do("up", str(len(self.names)))
        return self

    def __exit__(self, *_: object) -> None:
        self._do("down")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _do(self, *words: str) -> str:
        done = subprocess.run(
            [self._script, *words], env=self.environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stdout}{done.stderr}")
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the scripts know these hosts."""
        return os.environ | {
            "HOSTS_BASE": str(self._folder / "base"),
            "HOSTS_SHARE": f"{REPOSITORY}:{self.shared}",
            "HOSTS_PREFIX": self.prefix,
            **self._net,
        }

    def beside(self, words: Sequence[str], folder: Path) -> list[str]:
        """Returns the command that runs another one beside the hosts, where their processes can be
        entered, as the machine under containers: its address is ``10.77.0.1``.
        """
        switch = f"{self.prefix}-sw"
        address = ["ip", "-n", switch, "addr", "replace", "10.77.0.1/24", "dev", "br0"]
        subprocess.run(address, check=True)
        return ["ip", "netns", "exec", switch, "env", "-C", str(folder), *words]

    def between(self, words: Sequence[str]) -> list[str]:
        """Returns the command that runs another one where all packets between the hosts pass: at
        the interface ``br0``.
        """
        return ["ip", "netns", "exec", f"{self.prefix}-sw", *words]

    def command(self, host: str, words: Sequence[str], folder: Path | None = None) -> list[str]:
        """Returns the command that runs another one on a host, in a folder that all see."""
        pid = (self._folder / "base" / host / "init.pid").read_text().strip()
        inside = ["nsenter", "-t", pid, "-n", "-m", "-u", "-i", "-p", "--"]
        return [*inside, "env", "-u", "TMPDIR", "-C", str(folder or self.shared), *words]

    def on(self, host: str, *words: str, timeout: float = 60) -> str:
        """Runs a command on a host, and returns what it writes."""
        done = subprocess.run(
            self.command(host, words), capture_output=True, text=True, timeout=timeout
        )
        if done.returncode:
            raise RuntimeError(f"{host}: {words}: {done.stdout}{done.stderr}")
        return done.stdout

    def cut(self, host: str) -> None:
        """Pulls a host's cable: what is sent vanishes, and nobody is told."""
        self._do("cut", host)
        self._cut.add(host)

    def mend(self, host: str) -> None:
        """Puts it in again."""
        self._do("mend", host)
        self._cut.discard(host)

    def freeze(self, host: str) -> None:
        """Stops every process of a host."""
        self._do("freeze", host)
        self._frozen.add(host)

    def thaw(self, host: str) -> None:
        """Lets them go on."""
        self._do("thaw", host)
        self._frozen.discard(host)

    def crash(self, host: str) -> None:
        """Switches a host off."""
        self._do("crash", host)
        self._crashed.add(host)

    def boot(self, host: str) -> None:
        """Switches on a host again, as it was at first: its temporary files are gone."""
        self._do("boot", host)
        for disturbed in (self._crashed, self._cut, self._frozen):
            disturbed.discard(host)

    def restore(self, seconds: float = 60) -> list[str]:
        """Boots the hosts that are not as they were at first; returns what was found of each.

        What runs has so many seconds to end.
        """
        states = {"off": self._crashed, "cut off": self._cut, "frozen": self._frozen}
        found = [f"{host} is {state}" for state, hosts in states.items() for host in sorted(hosts)]
        for host in self._crashed | self._cut | self._frozen:
            self.boot(host)
        left = self.left(seconds)
        for host in {line.partition(":")[0] for line in left}:
            self.boot(host)
        return found + left

    def processes(self, host: str) -> list[str]:
        """Returns what runs on a host besides its own services: pids of its own, and commands."""
        if host in self._crashed:
            return []
        listed = self.on(host, "ps", "-ww", "-e", "-o", "stat=,comm=,pid=,args=").splitlines()
        words = [line.split(None, 3) for line in listed]
        return [
            f"{host}: {pid} {args}"
            for state, name, pid, args in words
            if name not in (*_OWN, "ps") and not state.startswith("Z")
        ]

    def files(self, host: str) -> list[str]:
        """Returns the files of allranks and MPI in a host's /tmp and /dev/shm."""
        if host in self._crashed:
            return []
        found = self.on(host, "find", "/tmp", "/dev/shm", *_ITS_CONTENTS)
        places = REPOSITORY, Path.home()  # both may lie below /tmp
        kept = {*places, *(parent for place in places for parent in place.parents)}
        return [
            f"{host}: {path}"
            for path in found.split()
            if not path.startswith(str(self._folder)) and Path(path) not in kept
        ]

    def left(self, seconds: float = 60) -> list[str]:
        """Returns which processes and files are left on any host once so many seconds have gone."""
        deadline = time.monotonic() + seconds
        while True:
            left = [line for name in self.names for line in self.processes(name)]
            left += [line for name in self.names for line in self.files(name)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)
