"""``import horovod`` finds an installed Horovod, otherwise allranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from allranks.horovod import alias


def python(source: str, **env: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, env={**os.environ, **env}
    )
    return answer.stdout + answer.stderr.splitlines()[-1] if answer.stderr else answer.stdout


def test_one_import_makes_the_name_known():
    said = python("import allranks.horovod, horovod; print(horovod is allranks.horovod)")
    assert said == "True\n"


def test_a_real_horovod_is_never_shadowed(tmp_path):
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("real = True")
    source = "import allranks.horovod, horovod; print(horovod.real)\nimport horovod.tensorflow"
    said = python(source, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert said.startswith("True\n")
    assert said.endswith("No module named 'horovod.tensorflow'")


def test_an_unknown_setting_is_refused():
    said = python("import allranks.horovod", ALLRANKS_HOROVOD="no")
    assert said.endswith(
        "expected ALLRANKS_HOROVOD to be on, name or off, found 'no'. Unset it for on."
    )


@pytest.mark.parametrize(
    ("setting", "in_notebook", "adapted"),
    [("on", False, True), ("name", False, False), ("on", True, False)],
)
def test_keras_gets_its_older_names_on_ranks(tmp_path, setting, in_notebook, adapted):
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "__init__.py").touch()
    (tmp_path / "keras" / "backend.py").touch()
    said = python(
        f"from allranks.horovod import alias\nalias.install(in_notebook={in_notebook})\n"
        "import keras.backend\nprint('__getattr__' in vars(keras.backend))",
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        ALLRANKS_HOROVOD=setting,
    )
    assert said == f"{adapted}\n"


def test_it_can_be_switched_off():
    said = python("import allranks.horovod, horovod", ALLRANKS_HOROVOD="off")
    assert said.endswith("No module named 'horovod'")


def test_other_frameworks_are_said_not_to_be_here():
    said = python("import allranks.horovod, horovod.torch")
    assert "found horovod.torch, which is for PyTorch" in said
    assert "torch.distributed.init_process_group() connects the ranks" in said
    asked = "import allranks.horovod\ntry:\n    import horovod.torch\nexcept ModuleNotFoundError:\n"
    assert python(asked + "    print('no')") == "no\n"


def test_parts_of_horovod_have_their_places():
    from_common = "from horovod.common.exceptions import HorovodInternalError as E"
    said = python(f"import allranks.horovod\n{from_common}\nprint(E.__mro__[1].__name__)")
    assert said == "RuntimeError\n"
    assert alias.place_of("horovod.keras.callbacks") == "allranks.tensorflow.keras.callbacks"
    assert alias.place_of("horovodrun") is None


def test_a_script_is_run_as_it_is(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import sys, horovod\nprint(__name__, sys.argv[1:], horovod.__version__)")
    ended = subprocess.run(
        [sys.executable, "-m", "allranks.horovod", script, "--lr", "1"],
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "__main__ ['--lr', '1'] 0.28.1\n"


def test_a_script_that_is_not_there_is_named():
    ended = subprocess.run(
        [sys.executable, "-m", "allranks.horovod", "none.py"], capture_output=True, text=True
    )
    assert "expected a script, found 'none.py'" in ended.stderr


INSIDE = """
import allranks.horovod
from horovod.common.exceptions import HorovodVersionMismatchError
from horovod.common.util import _cache, check_extension, extension_available, get_ext_suffix
from horovod.runner import run
from horovod.runner.common.util import env as environment
from horovod.runner.common.util.env import get_env_rank_and_size, is_exportable
from horovod.runner.util.threads import in_thread

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
"""


def test_packages_that_build_on_horovod_find_what_they_import():
    ended = subprocess.run(
        [sys.executable, "-c", INSIDE],
        env=os.environ | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
        capture_output=True,
        text=True,
    )
    assert ended.stdout == (
        "allranks works with TensorFlow and Keras: found horovod.torch. "
        'Install them: pip install "allranks[tensorflow]"\n(1, 4) 2\n'
    )
