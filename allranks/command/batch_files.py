"""Files for batch systems that run an exported script: sbatch's script, or a manifest.

Source: mpi-operator's MPIJob, kubeflow.org/v2beta1; Trainer's TrainJob,
trainer.kubeflow.org/v1alpha1. Both put the list of hosts into /etc/mpi/hostfile of the container
that starts ``mpiexec``, and let it reach the others by ssh.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from allranks.cluster.launchers.mpiexec import mpi_environment, mpiexec
from allranks.errors import UsageError

#: Settings of mpiexec for all systems. In a container, every user is root.
_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    # Else each of a node's first ranks gets one core for all of its threads.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
_SSH = "-o LogLevel=ERROR -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
#: For pods: their host keys are new, and their names have dots.
_PODS = _MPI | {
    "PRTE_MCA_plm_ssh_args": f"-o ConnectionAttempts=10 {_SSH}",
    "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
}
_HOSTFILE = "/etc/mpi/hostfile"
#: The pod that starts mpiexec may be up before the others, or before their names resolve.
_WHEN_ALL_ANSWER = (
    "while read -r host slots; do tries=0; "
    f'until ssh -n -o ConnectTimeout=5 {_SSH} "$host" true 2> /dev/null; do tries=$((tries + 1)); '
    '[ $tries -lt 300 ] || { echo "$host does not answer to ssh" >&2; exit 1; }; sleep 1; done; '
    f'done < {_HOSTFILE}; exec "$@"'
)
_WAIT = ["sh", "-c", _WHEN_ALL_ANSWER, "allranks"]
_MOUNTED = "/allranks"
#: Largest length of an argument in a TrainJob.
_ONE_ARGUMENT = 65536


class JobFile(NamedTuple):
    """A script, and the resources of its job. ``seconds`` is 0 for the system's default limit.

    ``image`` is empty for Slurm; ``inside`` is the path of the script in the image, empty if it is
    not there; ``runtime`` is Trainer's; ``more`` is options of sbatch.
    """

    name: str
    file: str
    source: str
    nodes: int
    each: int
    gpus: int = 0
    seconds: int = 0
    image: str = ""
    inside: str = ""
    runtime: str = ""
    more: Sequence[str] = ()

    @property
    def size(self) -> int:
        return self.nodes * self.each


def slurm(job: JobFile) -> str:
    """Returns a script for sbatch that uses this Python and its mpiexec."""
    asked = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.each}",
        f"--output={job.name}-%j.log",
        # A lost node ends its ranks and their data: to run the job again would not help.
        "--no-requeue",
    ]
    if job.gpus:
        asked.append(f"--gpus-per-node={job.gpus}")
    if job.seconds:
        minutes, seconds = divmod(job.seconds, 60)
        asked.append(f"--time={minutes // 60}:{minutes % 60:02}:{seconds:02}")
    settings = mpi_environment(alone=False)
    # An environment module may put another MPI library first.
    library = {name: settings[name] for name in ("MPI4PY_LIBMPI",) if name in settings}
    command = [mpiexec(), "-n", str(job.size), sys.executable, job.file]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in [*map(shlex.quote, asked), *_pairs(job.more)]),
            f"# {job.size} ranks. To submit it: sbatch {job.name}.sbatch",
            "",
            *(f"export {name}={shlex.quote(value)}" for name, value in (_MPI | library).items()),
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def _pairs(options: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in options:
        if word.startswith("-") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def mpijob(job: JobFile) -> str:
    """Returns a manifest of an MPIJob, and of the script that its pods mount."""
    name = _dns(job.name)
    file = re.sub(r"[^A-Za-z0-9._-]", "-", job.file)
    python = ["python", job.inside or f"{_MOUNTED}/{file}"]
    launch = _kept([*_WAIT, *_started(job), *python])
    serve = "mkdir -p /run/sshd && ssh-keygen -A && exec /usr/sbin/sshd -De"
    worker: dict[str, Any] = {"command": ["sh", "-c", serve]}
    if job.gpus:
        worker["resources"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if job.seconds:
        policy["activeDeadlineSeconds"] = job.seconds
    made = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": job.each,
            "mpiImplementation": "OpenMPI",
            "runPolicy": policy,
            "mpiReplicaSpecs": {
                "Launcher": _replica(job, 1, {"command": launch, "env": _variables(_PODS)}),
                "Worker": _replica(job, job.nodes, worker),
            },
        },
    }
    documents = [made]
    if not job.inside:
        script = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{name}-script"},
            "data": {file: job.source},
        }
        documents.insert(0, script)
    comment = (
        f"# {job.nodes} pods of {job.each} ranks. To submit it: kubectl apply -f FILE\n"
        f"# {job.image} has python, allranks, what the script imports, ssh and sshd.\n"
    )
    return comment + "---\n".join(yaml(document) for document in documents)


def _replica(job: JobFile, count: int, container: Mapping[str, Any]) -> dict[str, Any]:
    one: dict[str, Any] = {"name": "allranks", "image": job.image, **container}
    pod: dict[str, Any] = {"containers": [one]}
    if not job.inside:
        one["volumeMounts"] = [{"name": "script", "mountPath": _MOUNTED}]
        pod["volumes"] = [{"name": "script", "configMap": {"name": f"{_dns(job.name)}-script"}}]
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}


def trainjob(job: JobFile) -> str:
    """Returns a manifest of a TrainJob, for a runtime whose nodes run sshd.

    Raises UsageError for a name that Kubernetes refuses, or a script that is too long.
    """
    if not job.inside and len(job.source) > _ONE_ARGUMENT:
        raise UsageError(
            f"expected a script of {_ONE_ARGUMENT} characters or less, which a TrainJob can hold, "
            f"found {len(job.source)}. Put it into the image, and type for example: "
            f"--script /app/{job.file}"
        )
    # A TrainJob has no files: mpiexec passes the source to each rank.
    python = ["python", job.inside] if job.inside else ["python", "-c", job.source]
    trainer: dict[str, Any] = {
        "image": job.image,
        "command": _kept(_WAIT),
        "args": _kept([*_started(job), *python]),
        "env": _variables(_PODS),
        "numNodes": job.nodes,
        "numProcPerNode": job.each,
    }
    if job.gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": job.gpus}}
    spec: dict[str, Any] = {"runtimeRef": {"name": job.runtime}, "trainer": trainer}
    if job.seconds:
        spec["activeDeadlineSeconds"] = job.seconds
    made = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": _dns(job.name)},
        "spec": spec,
    }
    comment = (
        f"# {job.nodes} nodes of {job.each} ranks. To submit it: kubectl apply -f FILE\n"
        f"# The runtime {job.runtime} is one of MPI, and its nodes have allranks too.\n"
    )
    return comment + yaml(made)


def _started(job: JobFile) -> list[str]:
    return ["mpiexec", "--hostfile", _HOSTFILE, "-n", str(job.size)]


def _kept(words: Sequence[str]) -> list[str]:
    # Kubernetes replaces two dollars by one.
    return [word.replace("$", "$$") for word in words]


def _variables(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _dns(name: str) -> str:
    # Kubernetes accepts lower-case letters, digits and dashes.
    made = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    made = made if made[:1].isalpha() else f"job-{made}".rstrip("-")
    return made[:50].rstrip("-")


def yaml(value: object, indent: int = 0) -> str:
    """Returns a value as YAML: dictionaries and lists in blocks, all else as JSON."""
    blanks = " " * indent
    if isinstance(value, Mapping) and value:
        return "".join(f"{blanks}{key}:{_below(one, indent)}" for key, one in value.items())
    if isinstance(value, list) and value:
        below = [yaml(one, indent + 2)[indent + 2 :] for one in value]
        return "".join(f"{blanks}- {one}" for one in below)
    return f"{blanks}{_scalar(value, indent)}\n"


def _below(value: object, indent: int) -> str:
    if isinstance(value, Mapping | list) and value:
        return f"\n{yaml(value, indent + 2)}"
    return f" {_scalar(value, indent + 2)}\n"


def _scalar(value: object, indent: int) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z/][\w./-]*", value) and value.lower() not in _WORDS:
        return value
    readable = "\n" in value and re.fullmatch(
        r"[^\s][^\x00-\x08\x0b-\x1f\x7f\x85\u2028\ufeff]*", value
    )
    if not readable:
        return json.dumps(value)
    chomped = "|" if value.endswith("\n") and not value.endswith("\n\n") else "|-"
    if chomped == "|-" and value.endswith("\n"):
        return json.dumps(value)
    body = "\n".join(f"{' ' * indent}{line}" if line else "" for line in value.splitlines())
    return f"{chomped}\n{body}"


#: Words that YAML does not read as text.
_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
