"""A stand-in for the commands of PBS and of LSF, as they are documented, on hosts that ssh reaches.

It is called by their names, through links. A job runs on ``h1`` and ``h2``; as long as there is a
file ``hold`` it waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

HERE = Path(sys.argv[0]).absolute().parent
HOSTS = ("h1", "h2")
_FIRST = 7


def submit(script: str, output: str) -> str:
    """Returns the number of the job."""
    number = str(_FIRST + len(list(HERE.glob("script-*"))))
    (HERE / f"script-{number}").write_text(script)
    (HERE / "nodes").write_text("".join(f"{host}\n" for host in HOSTS for _ in range(2)))
    with open(output, "w") as log:
        job = subprocess.Popen(
            [sys.argv[0], "serve", number],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (HERE / f"job-{number}").write_text(str(job.pid))
    return number


def serve(number: str) -> None:
    while (HERE / "hold").exists():
        time.sleep(0.1)
    (HERE / f"runs-{number}").touch()
    variables = [f"{name}={HERE}/nodes" for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")]
    words = [f"PATH={HERE}:/usr/bin:/bin", *variables, "sh", f"{HERE}/script-{number}"]
    os.execvp("ssh", ["ssh", "-T", HOSTS[0], "env", *words])


def state(number: str) -> str:
    pid = int((HERE / f"job-{number}").read_text())
    if not Path(f"/proc/{pid}").exists():
        return "ended"
    return "runs" if (HERE / f"runs-{number}").exists() else "waits"


def cancel(number: str) -> None:
    # What the job runs on its hosts is told to end.
    for host in HOSTS if state(number) == "runs" else ():
        subprocess.run(["ssh", "-T", host, "pkill", "-f", "allranks.relay"])
    with suppress(ProcessLookupError):
        os.kill(int((HERE / f"job-{number}").read_text()), signal.SIGTERM)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def qsub(words: list[str]) -> None:
    assert "select=2:ncpus=2:mpiprocs=2" in words
    print(f"{submit(sys.stdin.read(), option(words, '-o'))}.h0")


def qstat(words: list[str]) -> None:
    assert words[:-1] == ["-x", "-f", "-F", "json"]
    found = state(words[-1].removesuffix(".h0"))
    about: dict[str, object] = {"job_state": {"waits": "Q", "runs": "R", "ended": "F"}[found]}
    about |= {"queue": "workq", "comment": "Not Running: Insufficient amount of resource: ncpus"}
    about |= {"exec_host": "+".join(f"{host}/0*2" for host in HOSTS), "Exit_status": 271}
    print(json.dumps({"Jobs": {words[-1]: about}}))


def bsub(words: list[str]) -> None:
    assert (option(words, "-n"), option(words, "-R")) == ("4", "span[ptile=2]")
    number = submit(sys.stdin.read(), option(words, "-o"))
    print(f"Job <{number}> is submitted to default queue <normal>.")


def bjobs(words: list[str]) -> None:
    wanted = "stat queue exec_host pend_reason exit_reason delimiter='|'"
    assert words[:-1] == ["-a", "-noheader", "-o", wanted]
    stat = {"waits": "PEND", "runs": "RUN", "ended": "EXIT"}[state(words[-1])]
    hosts = "-" if stat == "PEND" else ":".join(f"2*{host}" for host in HOSTS)
    print(f"{stat}|normal|{hosts}|Job slot limit reached|TERM_OWNER: job killed by owner")


def launch(words: list[str]) -> None:
    os.execvp("ssh", ["ssh", "-T", words[0], *words[1:]])


def main() -> None:
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    if words[0] == "serve":
        serve(words[1])
    elif name in ("qdel", "bkill"):
        cancel(words[0].removesuffix(".h0"))
    elif name in ("pbs_tmrsh", "blaunch"):
        launch(words)
    else:
        {"qsub": qsub, "qstat": qstat, "bsub": bsub, "bjobs": bjobs}[name](words)


if __name__ == "__main__":
    main()
