"""``import horovod`` finds an installed Horovod, otherwise allranks, with the names of the page."""

from __future__ import annotations

import builtins
import os
import subprocess
import sys

import pytest

from allranks.horovod import alias
from tests.horovod import names


def python(*arguments: object, **env: str) -> str:
    """Returns the output of a Python, and the last line of its errors."""
    ended = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **env}
    )
    return ended.stdout + "".join(ended.stderr.splitlines()[-1:])


INSIDE = """
import allranks.horovod, horovod
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError
from horovod.common.util import _cache, check_extension, extension_available, get_ext_suffix
from horovod.runner import run
from horovod.runner.common.util import env as environment
from horovod.runner.common.util.env import get_env_rank_and_size, is_exportable
from horovod.runner.util.threads import in_thread

assert horovod is allranks.horovod
assert HorovodInternalError.__mro__[1] is RuntimeError
told = []
in_thread(told.append, args=(1,)).join()
in_thread(lambda: 1 / 0, silent=True).join()
calls = _cache(lambda x: told.append(x))
calls(2), calls(2)
assert told == [1, 2]
assert is_exportable("PATH") and not is_exportable("BASH_FUNC_x")
assert run is allranks.horovod.run and environment.LOG_LEVEL_STR[0] == "FATAL"
assert get_ext_suffix()
try:
    check_extension("horovod.torch")
except ImportError as error:
    print(error)
print(get_env_rank_and_size(), HorovodVersionMismatchError("a", "1", "2").installed_version)
try:
    import horovod.torch
except ModuleNotFoundError as error:
    print(error)
"""


def test_scripts_and_packages_that_build_on_horovod_find_what_they_import():
    ended = python("-c", INSIDE, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="4").splitlines()
    assert ended == [
        "allranks works with TensorFlow and Keras: found horovod.torch. "
        'Install them: pip install "allranks[tensorflow]"',
        "(1, 4) 2",
        "allranks has Horovod's functions for TensorFlow and Keras, found horovod.torch, which is "
        "for PyTorch. Use torch's own: torch.distributed.init_process_group() connects the ranks "
        "without arguments, and DistributedDataParallel(model) averages gradients",
    ]
    assert alias.place_of("horovod.keras.callbacks") == "allranks.tensorflow.keras.callbacks"
    assert alias.place_of("horovodrun") is None


def test_a_real_horovod_is_never_shadowed(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True")
    source = "import allranks.horovod, horovod; print(horovod.real)\nimport horovod.tensorflow"
    said = python("-c", source, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert said == "True\nModuleNotFoundError: No module named 'horovod.tensorflow'"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("no", "expected ALLRANKS_HOROVOD to be on, name or off, found 'no'. Unset it for on."),
        ("off", "No module named 'horovod'"),
    ],
)
def test_it_can_be_switched_off(setting, said):
    assert python("-c", "import allranks.horovod, horovod", ALLRANKS_HOROVOD=setting).endswith(said)


ADAPTED = """
import os, sys
from allranks.horovod import alias
for setting, in_notebook in (("on", False), ("name", False), ("on", True)):
    os.environ["ALLRANKS_HOROVOD"] = setting
    alias.install(in_notebook=in_notebook)
    import keras.backend
    print("__getattr__" in vars(keras.backend))
    del sys.modules["keras"], sys.modules["keras.backend"]
"""


def test_keras_gets_its_older_names_on_ranks_only(tmp_path):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").touch()
    (tmp_path / "keras" / "backend.py").touch()
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    assert python("-c", ADAPTED, PYTHONPATH=path) == "True\nFalse\nFalse\n"


def test_a_script_is_run_as_it_is(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, horovod\nprint(__name__, sys.argv[1:], horovod.__version__)")
    assert python("-m", "allranks.horovod", script, "--lr", "1") == (
        "__main__ ['--lr', '1'] 0.28.1\n"
    )
    assert "expected a script, found 'none.py'" in python("-m", "allranks.horovod", "none.py")


def test_a_missing_tensorflow_comes_with_the_install_line():
    said = python("-c", "import sys; sys.modules['tensorflow'] = None; import allranks.tensorflow")
    assert said.startswith(
        "allranks.errors.MissingDependency: allranks.tensorflow needs TensorFlow"
    )
    assert said.endswith('pip install "allranks[tensorflow]"')


def test_the_page_has_a_note_for_each_difference():
    assert sum(map(len, names.MODULES.values())) == 45
    for rows in names.MODULES.values():
        for row in rows:
            assert row.note or row.here == "works", row.names
            assert bool(row.tried) == (row.here != "not here"), row.names
            assert set(row.tried) <= {names.EAGER, names.FUNCTION, names.SESSION}, row.names


@pytest.mark.parametrize(("setting", "version_1"), [(None, False), ("0", False), ("1", True)])
def test_a_setting_of_0_leaves_import_tensorflow_as_it_is(monkeypatch, setting, version_1):
    if setting is None:
        monkeypatch.delenv(alias.TENSORFLOW_SETTING, raising=False)
    else:
        monkeypatch.setenv(alias.TENSORFLOW_SETTING, setting)
    before = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", before)
    assert alias.install_tensorflow() == version_1
    assert (builtins.__import__ is not before) == version_1
