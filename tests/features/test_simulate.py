"""Simulated ranks, in a notebook: as real ones, but in one process."""

from __future__ import annotations

import os
import textwrap

import pytest

from tests.features.random_programs import program
from tests.kernel import wait_until

#: Programs for each number of ranks that are compared with real ranks.
PROGRAMS = int(os.environ.get("ALLRANKS_SIMULATED_PROGRAMS", "1"))


@pytest.fixture
def simulate(notebook):
    def run(source, n=4, options=""):
        return notebook.on_ranks(textwrap.dedent(source).strip(), f"-n {n} --simulate {options}")

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_random_programs_give_the_same_bits_as_on_real_ranks(notebook, simulate, size):
    notebook.run(f"%distributed restart -n {size}")
    for number in range(PROGRAMS):
        source = program(1000 * size + number, steps=40)
        real = notebook.on_ranks(source, "-o real")
        assert real.status == "ok", real.text
        simulated = simulate(source, size, "-o simulated")
        assert simulated.status == "ok", simulated.text
        assert notebook.run("print(real == simulated, len(real[0]) > 20)").text == "True True\n"


def test_a_thousand_ranks_print_reduce_and_pass_a_ring(simulate):
    source = """
    import numpy as np
    total = allreduce(np.full(128, float(rank)), op=Sum)
    comm.send(rank, (rank + 1) % size)
    print(total[0], comm.recv(source=(rank - 1) % size) == (rank - 1) % size)
    """
    assert simulate(source, 1024).text == "ranks 0–1023 │ 523776.0 True\n"


def test_variables_stay_and_belong_to_one_rank(simulate):
    simulate("import random, numpy as np\nmine = rank * 10\nrandom.seed(rank)\nnp.random.seed(1)")
    simulate("first = random.random(), np.random.rand()\nbarrier()")
    cell = simulate(
        "random.seed(rank); np.random.seed(1)\n"
        "print(mine == 10 * rank, first == (random.random(), np.random.rand()))"
    )
    assert cell.text == "ranks 0–3 │ True True\n"
    assert "NameError: name 'mine'" in simulate("mine", 3).text
    cell = simulate("print(mine // 10, local_size, cross_size)", options="--network p100")
    assert cell.text.startswith("rank 0 │ 0 4 1\nrank 1 │ 1 4 1\n")


def test_what_a_with_block_and_a_module_of_the_user_hold_belongs_to_one_rank(
    simulate, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "of_user.py").write_text(
        "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nrank = MPI.COMM_WORLD.rank\n"
    )
    source = f"""
    import io, sys, warnings
    from contextlib import redirect_stdout
    sys.path.insert(0, {str(folder)!r})
    import of_user
    with redirect_stdout(io.StringIO()) as text, warnings.catch_warnings():
        warnings.simplefilter("error" if rank else "ignore")
        print("hidden"); barrier()
        try: warnings.warn("x")
        except UserWarning: print(rank)
    print(of_user.rank == rank, text.getvalue().split())
    """
    shown = simulate(source, 2).text
    assert shown == "rank 0 │ True ['hidden']\nrank 1 │ True ['hidden', '1']\n"


def test_later_cells_have_the_clock_and_the_messages_of_earlier_ones(simulate):
    simulate("from time import sleep, perf_counter_ns\ncomm.send(rank, (rank + 1) % size)", 2)
    cell = simulate(
        "begin = perf_counter_ns(); sleep(5000); print(round((perf_counter_ns() - begin) / 1e9))\n"
        "print(comm.recv())",
        2,
    )
    assert cell.text == "ranks 0–1 │ 5000\nrank 0    │ 1\nrank 1    │ 0\n"


def test_a_cell_after_one_that_failed_does_not_receive_its_messages(simulate):
    simulate("comm.send('old', 1 - rank)\nif rank == 1: raise ValueError", 2)
    assert simulate("comm.send('new', 1 - rank)\ncomm.recv()", 2).text == "ranks 0–1 → 'new'\n"


def test_requests_end_as_those_of_mpi(simulate):
    source = """
    status, receive = MPI.Status(), comm.irecv(source=1 - rank, tag=9)
    receive.cancel()
    receive.wait(status)
    print(status.Is_cancelled())
    both = [MPI.REQUEST_NULL, comm.isend(rank, 1 - rank), comm.irecv(source=1 - rank)]
    print(MPI.Request.waitall(both)[2] == 1 - rank, both[1] == MPI.REQUEST_NULL)
    comm.send(0, 1 - rank, tag=-5)
    """
    text = simulate(source, 2).text
    assert "ranks 0–1 │ True\n          │ True True" in text
    assert "MPI_ERR_TAG" in text


def test_all_ranks_write_a_log_with_fewer_files_than_ranks(simulate):
    source = """
    import resource
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    print("x" * 40_000); barrier()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    """
    text = simulate(source, 300, "--view plain").text
    assert "rank-299.log" in text
    assert "lost" not in text


def test_the_same_seed_gives_the_same_order_of_messages(simulate):
    source = "print([comm.recv() for _ in range(size - 1)]) if rank == 0 else comm.send(rank, 0)"
    found = {seed: [simulate(source, 9, f"--seed {seed}").text] * 2 for seed in (1, 2, 3)}
    for seed, (before, _) in found.items():
        assert simulate(source, 9, f"--seed {seed}").text == before
    assert len({before for before, _ in found.values()}) > 1


def test_a_deadlock_is_named_with_its_ranks_and_lines(simulate):
    text = simulate("x = 1\ny = comm.recv(source=(rank + 1) % size)").text
    assert "ranks 0–3 wait for each other, and none can go on" in text
    assert "rank 0 for rank 1, rank 1 for rank 2" in text
    assert ":3: y = comm.recv(" in text
    large = simulate("comm.Ssend(bytes(9), (rank + 1) % size)", 2).text
    assert "ranks 0–1 wait in comm.Ssend" in large
    tags = simulate("if rank == 0: comm.send(1, 1, tag=1)\ncomm.recv(source=1 - rank, tag=2)", 2)
    assert "none can go on. Rank 0 has sent a message with tag 1, and rank 1 waits for" in tags.text


def test_objects_are_reduced_with_one_op(simulate):
    for call in ("allreduce", "reduce"):
        text = simulate(f"comm.{call}(1, op=MPI.MAX if rank == 1 else MPI.SUM)", 2).text
        assert f"comm.{call} needs the same reduction on every rank: rank 0 has SUM" in text


def test_the_rank_that_failed_comes_first_and_the_others_wait(simulate):
    text = simulate("if rank == 2: 1 / 0\nbarrier()").text
    assert text.index("rank 2 (") < text.index("ranks 0–1, 3 were waiting at line 3")
    assert "ZeroDivisionError: division by zero" in text
    assert simulate("print(allreduce(1, op=Sum))").text == "ranks 0–3 │ 4\n"


def test_an_allreduce_writes_to_the_array_that_it_is_given(simulate):
    given = "x = np.array([1.0 + rank])\nprint(allreduce(x, Sum, out=x) is x, x)"
    assert simulate(given).text == "ranks 0–3 │ True [10.]\n"


@pytest.mark.parametrize("of_numpy", [0, 3])
def test_sums_of_pythons_integers_have_any_size_within_a_host(simulate, of_numpy):
    cell = simulate(f"""
        import numpy as np
        assert allreduce(3**15, op=Product) == 3**60
        allreduce(np.int64(2**62) if rank == {of_numpy} else 2**62, op=Sum)
        """)
    others = "ranks 1–3" if of_numpy == 0 else "ranks 0–2"
    assert f"{others} → {2**64}\n" in cell.text
    assert f"rank {of_numpy}    → np.int64(0)\n" in cell.text
    cell = simulate("allreduce(2**62, op=Sum)", 8, "--network p100")
    assert "allreduce(Sum) between hosts needs a result of 64 bits: found 46116" in cell.error_value


def test_different_calls_are_a_mismatch(simulate):
    text = simulate("allreduce(1.0 if rank else [1.0, 2.0])").text
    assert "allreduce(Average) needs the same shape on every rank: rank 0 has (2,)" in text


def test_an_endless_loop_is_interrupted_and_variables_stay(notebook, simulate):
    simulate("kept = rank")
    cell = notebook.start(
        "%%distributed -n 4 --simulate\nprint('begun', flush=True)\n"
        "try:\n    while 1: pass\nfinally: barrier()"
    )
    cell.wait_for("begun")
    notebook.interrupt()
    assert "KeyboardInterrupt" in cell.wait().text
    assert simulate("print(kept)").text == "rank 0 │ 0\nrank 1 │ 1\nrank 2 │ 2\nrank 3 │ 3\n"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import tensorflow", "cannot import tensorflow"),
        ("!ls", "found !ls in line 2"),
        ("%cd /", "found %cd in line 2"),
        ("input()", "have no input()"),
        ("await x", "without await"),
        ("get_ipython().run_line_magic", "have no get_ipython()"),
        ("records()", "have no records()"),
        ("MPI.Win.Create(None)", "found MPI.Win"),
        ("comm.neighbor_allgather(0)", "found comm.neighbor_allgather"),
        ("comm.Spawn('x')", "found comm.Spawn"),
        ("comm.group.Range_incl([])", "found group.Range_incl"),
    ],
)
def test_what_needs_processes_is_refused(simulate, source, said):
    text = simulate(source).text
    assert said in text
    assert "%%distributed -n 4" in text


def test_figures_of_matplotlib_are_inline_with_and_without_its_magic(simulate):
    assert simulate("%matplotlib inline\nprint(rank)", 1).text == "rank 0 │ 0\n"


def test_a_forked_process_ends_with_its_rank(simulate):
    source = """
    import os
    child = os.fork() if rank == 0 else 0
    if child: print("it ended with", os.waitpid(child, 0)[1])
    elif rank == 0: mine = 1
    else: print("once")
    """
    # From Python 3.12 on, it may warn first that a process with threads forks.
    assert simulate(source, 2).text.endswith("│ it ended with 0\nrank 1 │ once\n")


def test_sleep_and_compute_take_simulated_time_only(simulate):
    source = """
    import time
    simulate.compute(1000 * rank)
    before = time.perf_counter(); time.sleep(500)
    print(round(time.perf_counter() - before), MPI.Wtime() // 1000)
    """
    found = simulate(source).text
    assert found.splitlines()[-1] == "rank 3 │ 500 3.0"


def test_ranks_that_compute_at_once_share_their_cores_on_the_network_here(notebook, simulate):
    # Figures as if three ranks at once took 1.5 times as long, as on two cores.
    notebook.run("""
import allranks.features.simulate.notebook as there
curves = dict.fromkeys(("inside", "allreduce"), [[8.0, 1e-6], [16.0, 1e-6]])
found = {3: {"curves": curves, "slowdowns": [(3, [[1e-3, 1.5]])],
    "ranks_each": 0, "computing_each": 0}}
measured, there.here = there.here, lambda where: found
""")
    source = """
    import time
    simulate.compute(0.01 * (rank + 1))
    mine = simulate.time
    barrier()
    alone = simulate.time
    simulate.compute(0.01 * (rank == 0))
    time.sleep(0.02)
    [round(1000 * seconds, 1) for seconds in (mine, alone, simulate.time)]
    """
    shown = simulate(source, 3, "--network here --compute given").text
    notebook.run("there.here = measured\n%distributed stop")
    found = [line.partition("→ ")[2] for line in shown.splitlines()[:3]]
    assert found == ["[15.0, 37.5, 67.5]", "[27.5, 37.5, 57.5]", "[37.5, 37.5, 57.5]"]


def test_the_time_on_a_network_is_shown_and_given_by_the_program(simulate):
    source = """
    simulate.compute(0.010 * (rank + 1))
    barrier()
    comm.sendrecv(bytes(10**6), (rank + 1) % size, source=(rank - 1) % size)
    round(simulate.time * 1e3, 3)
    """
    shown = simulate(source, 4, "--network laptop --compute given")
    # Two rounds of a barrier, and a message of 1 MB, each with a latency of 1 µs.
    assert "ranks 0–3 → 40.203" in shown.text
    assert "simulated time on laptop: 40.2 ms" in shown.text
    assert "waiting 37%" in shown.text
    table = simulate(source, 4, "--compute given --view full")
    assert "waits for rank 3" in "".join(str(one) for one in table.displays)
    assert "simulated time" not in simulate("barrier()").text


def test_the_end_of_the_process_is_reported_and_the_next_cell_starts_another(simulate):
    assert "all simulated ranks ended with their process" in simulate("import os; os._exit(3)").text
    assert "ranks 0–3 │ fresh" in simulate("print('fresh')").text


def test_other_options_are_refused(notebook):
    for line in ("--simulate -r 0", "--seed 3", "-n 100000 --simulate", "-n 1024 --explore"):
        cell = notebook.on_ranks("pass", line)
        assert cell.status == "error"
        assert "UsageError" in cell.text


def test_what_a_thread_writes_after_its_cell_is_shown_with_the_next_one(simulate, tmp_path):
    go, done = tmp_path / "go", tmp_path / "done"
    os.mkfifo(go)
    assert simulate(f"""
        import threading
        def late():
            open({str(go)!r}).close()
            print("late")
            open({str(done)!r}, "w").close()
        if rank == 0:
            threading.Thread(target=late).start()
        """).ok()
    go.open("w").close()
    wait_until(done.exists)
    late = "the process of the simulated ranks after its cell had ended: late"
    assert simulate("print('next')").text == f"ranks 0–3 · {late}\n          │ next\n"
