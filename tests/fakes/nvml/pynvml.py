"""FAKE pynvml: the GPUs that ALLRANKS_FAKE_NVML lists, as JSON, and no driver.

Each is {"uuid", "slices": [uuid, …], "used", "total": bytes, "processes": [[pid, bytes], …],
"lost": bool}. ALLRANKS_FAKE_CUDA is the driver's newest CUDA, as 12040 for 12.4.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

FAKE = True
NVML_TEMPERATURE_GPU = 0
GPUS = "ALLRANKS_FAKE_NVML"
CUDA = "ALLRANKS_FAKE_CUDA"


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_GpuIsLost(NVMLError):
    pass


def nvmlSystemGetCudaDriverVersion():
    return int(os.environ.get(CUDA, "12040"))


def _gpus():
    return json.loads(os.environ.get(GPUS, "null"))


def nvmlInit():
    if _gpus() is None:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")


def nvmlShutdown():
    return None


def nvmlDeviceGetCount():
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index):
    gpu = _gpus()[index]
    if gpu.get("lost"):
        raise NVMLError_GpuIsLost("GPU is lost")
    return {"whole": True, **gpu}


def nvmlDeviceGetHandleByUUID(uuid):
    for gpu in _gpus():
        if gpu["uuid"] == uuid:
            return {"whole": True, **gpu}
        if uuid in gpu.get("slices", ()):
            return {"whole": False, **gpu, "uuid": uuid, "parent": gpu}
    raise NVMLError_NotFound(uuid)


def nvmlDeviceGetUUID(handle):
    return handle["uuid"]


def nvmlDeviceGetMigMode(handle):
    if "slices" not in handle:
        raise NVMLError_NotSupported("MIG")
    return [int(bool(handle["slices"])), 0]


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if index >= len(handle["slices"]):
        raise NVMLError_NotFound(index)
    return {"whole": False, "uuid": handle["slices"][index], "parent": handle}


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle):
    return {"whole": True, **handle["parent"]}


def nvmlDeviceGetName(handle):
    return "FAKE GPU"


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=handle.get("used", 0), total=handle.get("total", 0))


def nvmlDeviceGetUtilizationRates(handle):
    if not handle["whole"]:
        raise NVMLError_NotSupported("utilization of a slice")
    return SimpleNamespace(gpu=87, memory=40)


def nvmlDeviceGetTemperature(handle, sensor):
    if not handle["whole"]:
        raise NVMLError_NotSupported("temperature of a slice")
    return 54


def nvmlDeviceGetComputeRunningProcesses(handle):
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=nbytes)
        for pid, nbytes in handle.get("processes", ())
    ]
