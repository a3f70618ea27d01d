"""``pytest --nranks``: each test starts pytest in a process of its own, as a user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from tests.conftest import REPOSITORY

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.timeout(300)

Result = pytest.RunResult


@pytest.fixture(autouse=True)
def in_own_process(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # Of an xdist worker that runs this test, and of a terminal that is narrower than a line.
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    # Sockets of ranks lie below it, and their paths have a limit.
    monkeypatch.setenv("HOME", os.path.expanduser("~root") if os.getuid() == 0 else "/tmp")


def on_ranks(pytester: pytest.Pytester, *arguments: str) -> Result:
    return pytester.runpytest_subprocess("-p", "no:randomly", *arguments)


FEATURES = """
    import asyncio
    import os
    import pytest

    SETUPS = []

    @pytest.fixture(scope="session")
    def whole(comm, size):
        SETUPS.append("session")
        assert comm.allreduce(1) == size
        yield comm
        comm.barrier()

    @pytest.fixture(scope="module")
    def of_module(whole, tmp_path_factory):
        SETUPS.append("module")
        yield tmp_path_factory.mktemp("data")
        whole.barrier()

    @pytest.fixture(scope="class")
    def of_class(of_module):
        SETUPS.append("class")
        return of_module

    @pytest.fixture
    def of_function(of_class, comm):
        SETUPS.append("function")
        yield
        comm.barrier()

    def test_rank_and_size(rank, size, comm):
        assert (comm.rank, comm.size) == (rank, size)
        assert comm.allgather(rank) == list(range(size))

    class TestOfAClass:
        def test_first(self, of_function):
            assert SETUPS == ["session", "module", "class", "function"]

        def test_second(self, of_function, comm, of_module):
            assert SETUPS == ["session", "module", "class", "function", "function"]
            assert len(set(comm.allgather(str(of_module)))) == 1

    @pytest.mark.parametrize("x", [1, 2])
    def test_parameter(x, comm):
        assert comm.allreduce(x) == 2 * x

    def test_a_folder_for_all(tmp_path, rank, comm):
        (tmp_path / str(rank)).touch()
        comm.barrier()
        assert sorted(os.listdir(tmp_path)) == ["0", "1"]

    def test_own_output_and_variables(rank, capsys, monkeypatch, record_property):
        monkeypatch.setenv("ALLRANKS_TRIED", str(rank))
        print(os.environ["ALLRANKS_TRIED"])
        assert capsys.readouterr().out == f"{rank}\\n"
        record_property("tried", "yes")

    def test_a_loop_of_its_own(rank, comm):
        async def numbers():
            return comm.allgather(rank)

        assert asyncio.run(numbers()) == [0, 1]

    @pytest.mark.nranks(0)
    def test_in_pytests_own_process():
        assert "mpi4py.MPI" not in __import__("sys").modules

    @pytest.mark.nranks(1, 2)
    def test_numbers(size, comm):
        assert comm.size == size
"""


def test_options_markers_fixtures_and_a_result_for_each_test(pytester: pytest.Pytester) -> None:
    """And the example of docs/pytest.md."""
    page = (REPOSITORY / "docs" / "pytest.md").read_text()
    (example,) = re.findall(r"<!-- run by \S+ -->\n```python\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(FEATURES, test_sum=example)
    ended = on_ranks(pytester, "--nranks", "2", "-v", "--junitxml=results.xml")
    ended.assert_outcomes(passed=16)
    ended.stdout.fnmatch_lines(
        ["*::test_in_pytests_own_process PASSED*", "*::test_numbers?1ranks? PASSED*"]
    )
    cases = [*ET.parse("results.xml").getroot().iter("testcase")]
    names = [case.get("name") for case in cases]
    assert len(names) == len(set(names)) == 16
    assert {"test_parameter[1]", "test_numbers[2ranks]"} <= {*names}
    (own,) = (case for case in cases if case.get("name") == "test_own_output_and_variables")
    assert len([*own.iter("property")]) == 1


def test_mpi_of_pytests_own_process_leaves_nothing_in_shared_memory(
    pytester: pytest.Pytester,
) -> None:
    """Test modules are imported there too."""
    pytester.makepyfile(
        """
        from pathlib import Path
        from mpi4py import MPI
        import pytest

        @pytest.mark.nranks(0)
        def test_in_own_process():
            Path("maps").write_text(Path("/proc/self/maps").read_text())

        @pytest.mark.nranks(2)
        def test_on_ranks(size):
            assert MPI.COMM_WORLD.size == size
        """
    )
    on_ranks(pytester).assert_outcomes(passed=2)
    maps = (pytester.path / "maps").read_text()
    segments = set(re.findall(r"/\S*/sm_segment\.\S+", maps))
    if not segments:
        pytest.skip("this MPI has no files in shared memory")
    assert [path for path in segments if os.path.exists(path)] == []


FAULTS = """
    import os
    import pytest

    @pytest.fixture
    def after(comm):
        yield
        comm.barrier()

    def test_exception(rank, comm, after):
        print("this is rank", rank)
        if rank == 1:
            assert rank == 7
        comm.barrier()

    def test_mismatch(rank, comm):
        if rank == 0:
            comm.allreduce(1)
        else:
            comm.barrier()

    def test_missing_call(rank, comm):
        if rank == 0:
            comm.barrier()

    def test_exit(rank, comm):
        if rank == 1:
            os._exit(3)
        comm.barrier()

    def test_after_the_exit(rank, comm):
        assert comm.allgather(rank) == [0, 1, 2]

    # Long enough for the others to come to their barrier.
    @pytest.mark.timeout(5)
    def test_endless(rank, comm):
        if rank == 1:
            while True:
                pass
        comm.barrier()

    def test_after_the_loop(rank, comm):
        assert comm.allgather(rank) == [0, 1, 2]
"""


def test_each_fault_fails_its_test_and_begins_with_the_cause(pytester: pytest.Pytester) -> None:
    file = pytester.makepyfile(FAULTS).name
    lines = (pytester.path / file).read_text().splitlines()
    at = {line.strip(): f"{file}:{number}" for number, line in enumerate(lines, 1)}
    ended = on_ranks(pytester, "--nranks", "3")
    ended.assert_outcomes(failed=5, passed=2)
    barriers = [
        f"{file}:{n}" for n, line in enumerate(lines, 1) if line.strip() == "comm.barrier()"
    ]
    ended.stdout.fnmatch_lines(
        [
            "*_ test_exception _*",
            "rank 1 of 3",
            "E *assert 1 == 7",
            f"{at['assert rank == 7']}: AssertionError",
            "*- other ranks -*",
            f"ranks 0, 2 waited at {barriers[1]}",
            "*Captured stdout call, rank 1*",
            "*_ test_mismatch _*",
            "E *CollectiveMismatch: *rank 0 has comm.allreduce, ranks 1–2 have comm.Barrier*",
            f"E *rank 0 at {at['comm.allreduce(1)']}*",
            f"* failed alike at {file}:*",
            "*_ test_missing_call _*",
            "rank 0 of 3",
            "E *RankLeft: rank* finished test_missing_call without calling comm.Barrier*",
            "ranks 1–2 passed",
            "*_ test_exit _*",
            "rank 1 of 3 died: ended with exit code 3*",
            f"ranks 0, 2 waited at {barriers[4]}",
            "*_ test_endless _*",
            "rank 1 of 3: the test exceeded its timeout of 5 s",
            f"{file}:*: KeyboardInterrupt",
            f"ranks 0, 2 waited at {barriers[5]}",
            f"FAILED {file}::test_exception - rank 1 of 3: assert 1 == 7",
        ]
    )


SKIPS = """
    import pytest

    def test_on_one_rank(rank, comm):
        if rank == 1:
            pytest.skip("an odd rank")
        comm.barrier()

    def test_on_all(rank):
        pytest.skip("none")

    @pytest.mark.xfail
    def test_expected(rank, comm):
        if rank == 1:
            raise ValueError
        comm.barrier()

    @pytest.mark.xfail
    def test_expected_on_one(rank):
        if rank == 1:
            raise ValueError

    @pytest.fixture
    def breaks_on_one(rank):
        if rank == 0:
            raise RuntimeError("broken")

    def test_setup_on_one(breaks_on_one, comm):
        comm.barrier()

    @pytest.fixture
    def broken_later(rank):
        yield
        if rank == 0:
            raise RuntimeError("broken")

    def test_teardown_on_one(broken_later, comm):
        comm.barrier()

    def test_last(comm):
        comm.barrier()
"""


def test_one_outcome_on_all_ranks_is_expected(pytester: pytest.Pytester) -> None:
    file = pytester.makepyfile(SKIPS).name
    ended = on_ranks(pytester, "--nranks", "2", "-rA")
    ended.assert_outcomes(failed=2, skipped=1, xfailed=1, errors=2, passed=2)
    ended.stdout.fnmatch_lines(
        [
            "*ERROR at setup of test_setup_on_one*",
            "rank 0 of 2",
            "E * RuntimeError: broken",
            f"rank 1 waited at {file}:*",
            "*ERROR at teardown of test_teardown_on_one*",
            "*_ test_on_one_rank _*",
            "*, found skipped on rank 1, waiting on rank 0. *",
            "rank 1: *an odd rank",
            "*_ test_expected_on_one _*",
            "*, found xpassed on rank 0, xfailed on rank 1. *",
        ]
    )


MARKED = """
    import pytest

    @pytest.mark.nranks(2)
    def test_fails(rank, comm):
        print("this is rank", rank)
        value = rank + 40
        assert rank == 0
        comm.barrier()

    @pytest.mark.nranks(2)
    def test_passes(rank, comm):
        print("hello from", rank)
        comm.barrier()

    def test_without_ranks():
        pass

    def test_needs_ranks(rank):
        pass
"""


def test_without_the_option_only_marked_tests_run_on_ranks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MARKED)
    ended = on_ranks(pytester, "-k", "not fails", "-s")
    ended.assert_outcomes(passed=2, errors=1, deselected=1)
    ended.stdout.fnmatch_lines(
        [
            "*rank 0 │ hello from 0",
            "rank 1 │ hello from 1",
            "expected the fixture 'rank' in a test on ranks, found it in pytest's own process. *",
        ]
    )


def test_x_ends_after_a_failure_and_lf_repeats_it_in_a_debugger(
    pytester: pytest.Pytester,
) -> None:
    """The debugger opens on the rank that failed."""
    pytester.makepyfile(MARKED)
    ended = on_ranks(pytester, "--nranks", "2", "-x")
    ended.assert_outcomes(failed=1)
    arguments = (sys.executable, "-mpytest", "--lf", "--pdb", f"--basetemp={pytester.path}/again")
    process = subprocess.run(
        arguments, input="p value\nc\n", capture_output=True, text=True, timeout=200
    )
    assert "1 failed" in process.stdout, process.stdout + process.stderr
    assert "rank 1 │ ipdb>" in process.stdout
    assert "41" in process.stdout


def test_a_number_that_is_none_is_an_error_that_says_what_to_type(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.nranks("2")
        def test_marked():
            pass
        """
    )
    ended = on_ranks(pytester)
    ended.assert_outcomes(errors=1)
    ended.stdout.fnmatch_lines(["*Type for example: @pytest.mark.nranks(2, 4)"])
    ended = on_ranks(pytester, "--nranks", "two")
    ended.stderr.fnmatch_lines(["*expected numbers of ranks, found 'two'.*"])


def test_each_worker_of_xdist_has_a_cluster(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.parametrize("n", [1, 2])
        def test_worker(n, comm, size, tmp_path):
            assert size == comm.allreduce(1) == 2
            names = set(comm.allgather(os.environ["PYTEST_XDIST_WORKER"]))
            (tmp_path / "of").write_text(*names)
            assert n == 1
        """
    )
    pytester.makeconftest(COUNTS)
    ended = on_ranks(pytester, "--nranks", "2", "-n", "2")
    ended.assert_outcomes(passed=1, failed=1)
    assert (pytester.path / "seen").read_text().endswith("end 0 ")
    ended.stdout.fnmatch_lines(["ranks 0–1 of 2", "FAILED *ranks 0–1 of 2: assert 2 == 1"])
    assert {file.read_text() for file in pytester.path.rglob("of")} == {"gw0", "gw1"}


def test_coverage_has_the_lines_of_all_ranks_in_one_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        covered="""
            def covered(rank):
                if rank == 0:
                    return "first"
                if rank == 1:
                    return "second"
                return "none"
            """,
        test_covered="""
            from covered import covered

            def test_covered(rank):
                assert covered(rank)
            """,
    )
    ended = on_ranks(pytester, "--nranks", "2", "--cov=covered", "--cov-report=term-missing")
    ended.assert_outcomes(passed=1)
    ended.stdout.fnmatch_lines(["covered.py * 6 * 1 * 83% * 6"])


COUNTS = """
    import psutil
    import pytest

    def note(config, what):
        if config.pluginmanager.has_plugin("allranks-on-rank"):
            return
        agents = sum(map(is_agent, psutil.Process().children()))
        with open(config.rootpath / "seen", "a") as file:
            file.write(f"{what} {agents} ")

    def is_agent(process):
        try:
            return "allranks.agent" in process.cmdline()
        except psutil.Error:  # it has just ended
            return False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(config):
        note(config, "collected")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart():
        note(CONFIG, "test")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(config):
        note(config, "end")

    def pytest_configure(config):
        global CONFIG
        CONFIG = config
"""
SOME = """
    import pytest

    def test_on_ranks():
        pass

    @pytest.mark.nranks(0)
    def test_in_own_process():
        pass
"""


@pytest.mark.parametrize(
    ("arguments", "code", "seen"),
    [
        (("-k", "on_ranks"), 0, "collected 1 test 1 end 0 "),
        (("-k", "own_process"), 0, "collected 1 test 0 end 0 "),
        (("-k", "none"), 5, "collected 1 end 0 "),
        (("--collect-only",), 0, "collected 0 end 0 "),
        (("missing.py",), 4, "end 0 "),
        (("test_some.py", "broken.py"), 2, "collected 1 end 0 "),
    ],
)
def test_ranks_start_while_tests_are_collected_and_none_is_left(
    pytester: pytest.Pytester, arguments: tuple[str, ...], code: int, seen: str
) -> None:
    pytester.makeconftest(COUNTS)
    pytester.makepyfile(test_some=SOME, broken="import none_of_this_name")
    ended = on_ranks(pytester, "--nranks", "2", *arguments)
    assert (ended.ret, (pytester.path / "seen").read_text()) == (code, seen)


def test_the_entry_module_imports_pytest_only() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import allranks.features.pytest.plugin; "
        "print(*{name for name in set(sys.modules) - before if not name.startswith('allranks')})"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*ended.stdout.split()} <= sys.stdlib_module_names
    assert "asyncio" not in ended.stdout
