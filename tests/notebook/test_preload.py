"""Ranks begin with the modules that they were told to."""

import shutil
import subprocess

import pytest

DRIVER = """
int state = 3;
int cuInit(unsigned flags) { state = 0; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return state; }
"""
"""FAKE libcuda.so.1, with its rule: 3 is CUDA_ERROR_NOT_INITIALIZED, which every call but cuInit
returns before cuInit. A stub of the driver returns 34, CUDA_ERROR_STUB_LIBRARY, from all of them.
Source: CUDA driver API, cuInit and CUresult."""
LOADS = "import ctypes; driver = ctypes.CDLL('./libcuda.so.1')"
STUB = f"{LOADS}; ctypes.c_int.in_dll(driver, 'state').value = 34"


@pytest.fixture
def kernel(own_kernel):
    yield own_kernel
    assert own_kernel.run("%distributed stop").status == "ok"


def test_a_module_is_there_before_the_first_cell(kernel):
    kernel.run(
        "%%distributed -n 2 --preload mailbox,allranks.lessons.model\n"
        "import sys\n"
        "[name in sys.modules for name in ('mailbox', 'allranks.lessons.model')]"
    ).says("ranks 0–1 → [True, True]")
    kernel.run("%%ensemble x=0:2\nimport sys\nresult = 'mailbox' in sys.modules").ok()
    assert kernel.run("print([member.result for member in runs])").text.strip() == "[True, True]"
    other = kernel.run("%%distributed --preload wave\npass")
    assert "--preload wave was given, but --preload mailbox," in other.text
    kernel.run("%distributed restart --preload wave").ok()
    cell = kernel.run("%%distributed\nimport sys\n'wave' in sys.modules, 'mailbox' in sys.modules")
    assert "ranks 0–1 → (True, False)" in cell.text


def test_a_module_that_is_not_installed_is_named_before_anything_starts(kernel):
    cell = kernel.run("%%distributed --preload no_such_module\npass")
    assert cell.text.startswith("MissingDependency: expected no_such_module to preload")
    cell = kernel.run("%%distributed --preload not-a-name\npass")
    assert cell.text.startswith("UsageError: expected names of modules, found 'not-a-name'")
    kernel.wait_for_no_children()


def test_a_module_may_print_what_it_likes_and_says_in_its_cell_if_it_cannot_be_imported(kernel):
    (kernel.cwd / "broken_module.py").write_text("raise RuntimeError('broken by itself')")
    (kernel.cwd / "printing_module.py").write_text(
        "print(42, 'null', [1], '{}', '[' * 100_000, sep='\\n', flush=True)"
    )
    cell = kernel.run("%%distributed -n 1 --preload printing_module,broken_module\n'started'")
    assert "rank 0 → 'started'" in cell.text
    kernel.run("%%distributed\nimport broken_module").says("RuntimeError: broken by itself")


def test_a_handler_of_logs_that_a_module_made_writes_to_the_rank_s_own_streams(kernel):
    (kernel.cwd / "logging_module.py").write_text(
        "import logging, sys\n"
        "class Closing(logging.StreamHandler):\n"
        "    def close(self):\n"
        "        # As absl's, which spares what it knows as a standard stream.\n"
        "        if self.stream not in (sys.stderr, sys.__stderr__):\n"
        "            self.stream.close()\n"
        "        super().close()\n"
        "closing = Closing()\n"
        "logger = logging.getLogger('logging_module')\n"
        "logger.addHandler(logging.StreamHandler())\n"
        "logger.propagate = False\n"
        "told = logging.getLogger('logging_module.told')\n"
        "told.addHandler(logging.StreamHandler(sys.stdout))\n"
        "told.propagate = False\n"
    )
    body = "import logging\nlogging.getLogger('logging_module').warning('the one line')"
    cell = kernel.run(f"%%distributed -n 2 --preload logging_module\n{body}").ok()
    loaded = kernel.run("%%distributed\nimport sys\n'logging_module' in sys.modules")
    assert loaded.text == "ranks 0–1 → True\n"
    assert cell.text.endswith("ranks 0–1 ! the one line\n")
    assert "Logging error" not in cell.text
    cell = kernel.run(
        "%%distributed\nlogging.getLogger('logging_module.told').warning('to standard output')"
    )
    assert cell.text == "ranks 0–1 │ to standard output\n"
    kernel.run("%%distributed\nimport sys\nsys.stderr.close()").ok()
    assert kernel.run(f"%%distributed\n{body}").text == "ranks 0–1 ! the one line\n"


def test_ranks_draw_different_random_numbers_unless_a_preloaded_module_has_seeded_them(kernel):
    (kernel.cwd / "drawing.py").write_text("import numpy as np\nnp.random.rand(3)")
    (kernel.cwd / "seeding.py").write_text("import numpy as np\nnp.random.seed(7)")
    draw = "import numpy as np\nfirst = allgather_object(np.random.rand())\nlen({*first})"
    cell = kernel.run(f"%%distributed -n 2 --preload drawing\n{draw}")
    assert cell.text.endswith("ranks 0–1 → 2\n")
    kernel.run("%%distributed\nif rank: import os; os._exit(1)")
    kernel.run(
        "%%distributed\nimport numpy as np\ndrawn = np.random.rand()\n"
        "before = broadcast_object(first if rank == 0 else None)\ndrawn in before"
    ).says("ranks 0–1 → False")
    kernel.run("%distributed restart --preload seeding").ok()
    assert kernel.run(f"%%distributed\n{draw}").text == "ranks 0–1 → 1\n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here: apt-get install gcc")
def test_a_module_that_opens_cuda_is_refused_before_anything_is_forked(kernel):
    (kernel.cwd / "driver.c").write_text(DRIVER)
    made = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run(made, cwd=kernel.cwd, check=True)
    (kernel.cwd / "loads_cuda.py").write_text(LOADS)
    (kernel.cwd / "loads_a_stub.py").write_text(STUB)
    (kernel.cwd / "opens_cuda.py").write_text(f"{LOADS}; driver.cuInit(0)")
    cell = kernel.run("%%distributed -n 1 --preload loads_cuda,opens_cuda\npass")
    assert cell.text.startswith(
        "StartFailed: --preload opens_cuda: importing this module initializes CUDA"
    )
    kernel.wait_for_no_children()
    cell = kernel.run("%%distributed -n 1 --preload loads_cuda,loads_a_stub\n'started'")
    assert "rank 0 → 'started'" in cell.text
    kernel.run("%distributed stop")
    # Who is shown no GPU can lose none.
    cell = kernel.run("%%distributed -n 1 --gpus none --preload opens_cuda\n'started'")
    assert "rank 0 → 'started'" in cell.text
