"""``allranks export``: cells as plain Python, and what batch systems are given."""

import ast
import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from allranks.command import batch_files
from allranks.command.export import export_script
from allranks.command.main import main
from allranks.command.notebook_cells import NotebookCell, cells_of, indented, plain_python
from allranks.errors import UsageError

SCHEMAS = Path(__file__).with_name("schemas")
LABS = sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb"))
SIMULATED = [path for path in LABS if path.stem in ("05_race", "08_simulate")]
SCRIPT = 'print("100 % of $HOME, $(id) and “more”")\n\n\n#\tthe end\n'
JOB = batch_files.JobFile(
    "04_Data Parallel", "04_Data Parallel.py", SCRIPT, 2, 4, image="me/train:1"
)


def cells(*sources: str, **tags: list[str]) -> list[NotebookCell]:
    """What is found in a notebook of these cells."""
    made = {"cells": [{"cell_type": "code", "source": one, "metadata": tags} for one in sources]}
    return [*cells_of(made)]


def script(*sources: str, **tags: list[str]) -> str:
    """The script of a notebook of these cells."""
    return export_script(cells(*sources, **tags), "n.ipynb", "n.py", "").source


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", *arguments])
    assert isinstance(ended.value.code, int), ended.value.code
    return ended.value.code


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A notebook's file in a folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    source = "%%distributed -n 8 --on 'slurm --nodes 2 --ntasks-per-node 4 --partition gpu'\nrank"
    made = {"nbformat": 4, "cells": [{"cell_type": "code", "source": [source]}]}
    (tmp_path / "train.ipynb").write_text(json.dumps(made))
    return "train.ipynb"


def schema_of(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_text()))


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("inside", ["", "/app/train.py"])
def test_manifests_are_valid_against_the_published_schemas(gpus, inside):
    job = JOB._replace(gpus=gpus, inside=inside, seconds=3600, runtime="deepspeed-distributed")
    *scripts, made = yaml.safe_load_all(batch_files.mpijob(job))
    schema_of("mpijob").validate(made)
    assert [one["kind"] for one in scripts] == ([] if inside else ["ConfigMap"])
    schema_of("trainjob").validate(yaml.safe_load(batch_files.trainjob(job)))


def test_a_field_that_the_schemas_do_not_know_is_refused():
    *_, made = yaml.safe_load_all(batch_files.mpijob(JOB))
    made["spec"]["slotsPerworker"] = 4
    assert [*schema_of("mpijob").iter_errors(made)]
    train = yaml.safe_load(batch_files.trainjob(JOB._replace(runtime="")))
    assert [error.json_path for error in schema_of("trainjob").iter_errors(train)] == [
        "$.spec.runtimeRef.name"
    ]


def test_an_mpijob_mounts_the_script_and_a_trainjob_has_it_among_its_arguments():
    scripts, made = yaml.safe_load_all(batch_files.mpijob(JOB))
    assert scripts["data"] == {"04_Data-Parallel.py": SCRIPT}
    replicas = made["spec"]["mpiReplicaSpecs"]
    assert replicas["Worker"]["replicas"] * made["spec"]["slotsPerWorker"] == JOB.size
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (volume,) = pod["volumes"]
        assert volume["configMap"]["name"] == scripts["metadata"]["name"]
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert mount == {"name": volume["name"], "mountPath": "/allranks"}
    (launcher,) = replicas["Launcher"]["template"]["spec"]["containers"]
    assert launcher["command"][-1] == "/allranks/04_Data-Parallel.py"
    made = yaml.safe_load(batch_files.trainjob(JOB._replace(runtime="mpi")))
    *_, flag, source = made["spec"]["trainer"]["args"]
    assert (flag, source.replace("$$", "$")) == ("-c", SCRIPT)
    with pytest.raises(UsageError, match="--script /app/"):
        batch_files.trainjob(JOB._replace(source="#" * 70_000))


@pytest.mark.parametrize(
    "text",
    ["", "yes", "1", "a: b", "a\nb", "a\nb\n", "a\n\n\n", " a\nb", "a\n b\n", "\ta\nb", "é\x85\n"],
)
def test_yaml_of_ours_is_read_as_it_was_written(text):
    value = {"a": [{"b": text, "c": [text]}, [], {}, 1, True], "d": {"e": {"f": text}}}
    assert yaml.safe_load(batch_files.yaml(value)) == value


def test_sbatch_is_asked_for_what_the_notebook_had(file, tmp_path):
    assert run(file, "--to", "slurm", "--time", "1:30:00", "--mem", "4 G") == 0
    text = (tmp_path / "train.sbatch").read_text()
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH" in line]
    assert asked == [
        *("--job-name=train", "--nodes=2", "--ntasks-per-node=4", "--output=train-%j.log"),
        *("--no-requeue", "--time=1:30:00", "--partition gpu", "--mem '4 G'"),
    ]
    assert text.endswith("/python train.py\n")
    assert "/mpiexec -n 8 " in text
    assert subprocess.run(["bash", "-n", tmp_path / "train.sbatch"]).returncode == 0
    compile((tmp_path / "train.py").read_text(), "train.py", "exec")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--to", "mpijob"], "expected --image"),
        (["--to", "slurm", "-np", "3", "--nodes", "2"], "Type for example: -np 2"),
        (["--to", "slurm", "--time", "soon"], "Type: --time 1:00:00"),
        (["--partition", "gpu"], "Options of sbatch go with --to slurm"),
        (["-o", "nowhere/train.py"], "expected a place to write to"),
    ],
)
def test_what_cannot_be_exported_so_says_what_to_type(file, typed, said):
    with pytest.raises(SystemExit) as ended:
        main(["export", file, *typed])
    assert said in str(ended.value.code)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (None, "expected a notebook of version 4"),
        ({"a": 1}, "expected a notebook of version 4"),
        ([3], r"found the 1\. of .* without: the file is damaged"),
        ([{"cell_type": "code"}], r"found the 1\. of .* without"),
        ([{"cell_type": "code", "source": ["%%distributed", 3]}], r"found the 1\. of .* without"),
        ([{"source": "%%distributed"}], r"found the 1\. of .* without"),
    ],
)
def test_a_notebook_that_is_damaged_is_refused(tmp_path, cells, said):
    (tmp_path / "n.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    with pytest.raises(SystemExit, match=said):
        main(["export", str(tmp_path / "n.ipynb")])


def test_cells_of_the_ranks_are_those_between_on_and_off_that_do_not_fail_on_purpose():
    cell = {"cell_type": "code", "source": "%%distributed\npass", "metadata": {"tags": 3}}
    made = {"cells": [cell, cell | {"metadata": None}], "metadata": {"kernelspec": None}}
    assert [one.fails for one in cells_of(made)] == [False, False]
    found = cells(
        "a = 1", "%distributed on", "b = 1", "%distributed status", "%distributed off", "c"
    )
    kinds = [(one.kind, one.source) for one in found if one.source]
    assert kinds == [("notebook", "a = 1"), ("ranks", "b = 1"), ("notebook", "c")]
    found = cells("%%distributed\nassert 0", tags=["raises-exception"])
    with pytest.raises(UsageError, match=r"found none for a script in n\.ipynb\. cell 1: left out"):
        export_script(found, "n.ipynb", "n.py", "")


def test_a_cell_of_some_ranks_is_exported_with_their_condition():
    text = script("%%rank 0,2\nprint('some')", "%%rank\nprint('all')")
    assert text == script(
        "%%distributed -r 0,2\nprint('some')", "%%distributed\nprint('all')"
    ).replace("%%distributed -r 0,2", "%%rank 0,2").replace("%%distributed", "%%rank")


@pytest.mark.parametrize(
    "source",
    [
        *("%px rank", "# on ranks\n%px rank", "%autopx", "%dist_init -n 2", "a = 1\n%sync"),
        *("%%px\nrank", "x = %px rank", "%time %px rank", "if x:\n    %px rank", "px rank"),
        *("%%capture\n%px rank", "get_ipython().run_line_magic('px', 'rank')"),
    ],
)
def test_a_magic_of_ipyparallel_or_nbdistributed_is_refused_wherever_it_stands(source):
    with pytest.raises(UsageError, match=r"cell 1 expected %%distributed, found %{1,2}\w+"):
        cells(source)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("%%time\n%%distributed -n 2\nrank", "%%distributed"),
        ("%%capture\n%%rank 0\nrank", "%%rank"),
        ("get_ipython().run_cell_magic('distributed', '', 'rank')", "%%distributed"),
        ("%time %distributed push x", "%distributed"),
        ("done = %distributed on", "%distributed"),
    ],
)
def test_a_magic_of_ours_in_another_one_is_refused(source, name):
    with pytest.raises(UsageError) as refused:
        cells(source)
    assert str(refused.value).startswith(f"cell 1 expected {name} at the beginning of a ")


@pytest.mark.parametrize(
    "source",
    [
        "x = %distributed pull x",
        "%distributed push x",
        "px = 3\nsync = px % 2",
        "print('%px rank')",
        "%%bash\necho a % b",
        "%load_ext allranks.px",
    ],
)
def test_what_only_resembles_a_magic_that_runs_on_ranks_is_exported(source):
    text = script(source, "%%distributed\nrank")
    assert "allranks.batch.show(rank)" in text


def test_in_the_kernel_of_ranks_cells_of_ipythons_magics_are_for_the_ranks():
    sources = ["%%time\na = 1", "%%local\nb = 1", "%pip install c", "%time d = 1"]
    made = {"cells": [{"cell_type": "code", "source": one} for one in sources]}
    made["metadata"] = {"kernelspec": {"name": "allranks-4"}}
    assert [one.kind for one in cells_of(made)] == ["ranks", "notebook", "notebook", "ranks"]


def test_the_notebook_itself_is_never_written(file, tmp_path):
    before = (tmp_path / file).read_text()
    with pytest.raises(SystemExit, match="expected a file beside the notebook"):
        main(["export", file, "-o", f"./{file}"])
    assert (tmp_path / file).read_text() == before


def test_a_notebook_of_any_name_is_a_module_with_imports_from_the_future_at_its_top():
    name = 'a\\N"""b.ipynb'
    text = export_script(cells("%%distributed\npass"), name, "n.py", "").source
    assert ast.get_docstring(ast.parse(text)).startswith(f"The distributed cells of {name}, in")
    text = script("%%distributed\nx = 1", "%%distributed\nfrom __future__ import annotations\ny: x")
    assert text.index("from __future__ import annotations\n") < text.index("import allranks.batch")
    compile(text, "n.py", "exec")


def test_half_a_character_stays_in_a_comment_and_is_no_python(file, tmp_path):
    half = chr(0xD83D)
    made = {"nbformat": 4, "cells": [{"cell_type": "code", "source": f"print('{half}')"}]}
    made["cells"].append({"cell_type": "code", "source": "%%distributed\npass"})
    (tmp_path / file).write_text(json.dumps(made))
    assert run(file) == 0
    assert r"#     print('\ud83d')" in (tmp_path / "train.py").read_text()
    made["cells"][0]["source"] = f"%%distributed\nprint('{half}')"
    (tmp_path / file).write_text(json.dumps(made))
    with pytest.raises(SystemExit, match="cell 1 expected Python that a script may have"):
        main(["export", file])


def test_a_line_that_cannot_be_understood_is_said_with_its_cell():
    with pytest.raises(UsageError, match="cell 2: unrecognized arguments: --bogus"):
        cells("%%distributed\npass", "%%distributed --bogus\npass")
    with pytest.raises(UsageError, match="cell 1: expected a command, found 'stpo'"):
        cells("%distributed stpo")


def test_what_runs_in_the_notebook_is_a_comment():
    text = script(
        "%load_ext allranks\nlimit = 3",
        "%distributed push limit",
        "%%ensemble lr=1,2\nresult = lr",
        "%%distributed --timeout 5 -o x\nrank",
    )
    assert (
        "# cell 1 is left out: it ran in the notebook, not on the ranks:\n#     limit = 3" in text
    )
    assert "# %distributed push limit\n# left out: the notebook gave the ranks its limit." in text
    assert "# cell 3 is left out: a notebook runs an ensemble" in text
    assert "# --timeout: nothing interrupts a cell of a script" in text
    assert "# -o x: a script has no notebook for the values" in text
    names = {name for name in compile(text, "n.py", "exec").co_names if name in ("limit", "lr")}
    assert names == set()


@pytest.mark.parametrize(
    ("cell", "becomes"),
    [
        ("x = 1\nx", "x = 1\nshow(x)"),
        ("x;", "x;"),
        ("print(1)", "print(1)"),
        ("(1,\n 2)  # two", "show((1,\n 2))  # two"),
        ("é = 1; é", "é = 1; show(é)"),
        ("%matplotlib inline\nx = 1", "pass  # %matplotlib inline\nx = 1"),
        ("if x:\n    %time f(1)", "if x:\n    f(1)"),
        ("%%time\n%%capture\nx = 1", "# %%time\n# %%capture\nx = 1"),
        (
            "a = 1\x0c\nif a:\n    %cd /\na",
            "a = 1\x0c\nif a:\n    __import__('os').chdir('/')  # %cd /\nshow(a)",
        ),
        ("%env A=b", "__import__('os').environ['A'] = 'b'  # %env A=b"),
        ("!ls /", "__import__('subprocess').run('ls /', shell=True)  # !ls /"),
        ("!pip install x", "pass  # !pip install x"),
        ("'%matplotlib'", "'%matplotlib'"),
        ("", "pass"),
        ("# nothing yet", "# nothing yet\npass"),
    ],
)
def test_ipythons_syntax_becomes_python(cell, becomes):
    done = plain_python(cell, "cell 1", "show")
    assert done.source == becomes
    compile(f"if True:\n{indented(done.source)}", "cell 1", "exec")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("files = !ls", "found !ls"),
        ("!ls {folder}", "found !ls {folder}"),
        ("%run other.py", "found %run other.py"),
        ("%%bash\nls", "found %%bash"),
        ("await f()", "Write asyncio.run"),
        ("x = = 1", "Mend the cell"),
    ],
)
def test_what_a_script_cannot_do_names_the_cell(cell, said):
    with pytest.raises(UsageError) as raised:
        plain_python(cell, "cell 7", "show")
    assert str(raised.value).startswith("cell 7 expected Python")
    assert said in str(raised.value)


def test_strings_of_several_lines_stay_when_a_cell_is_put_under_an_if():
    source = 'a = """one\n  two\n"""\nb = f"""{a}\nthree"""\nif a:\n    c = 1'
    plainly: dict[str, object] = {}
    exec(source, plainly)
    below: dict[str, object] = {}
    exec(f"if True:\n{indented(source)}", below)
    assert [below[name] for name in "abc"] == [plainly[name] for name in "abc"]


def test_a_cell_of_simulated_ranks_is_a_comment_with_the_option(file, tmp_path, capsys):
    made = json.loads((tmp_path / file).read_text())
    simulated = (
        "%%distributed -n 1024 --simulate --seed 3\nmine = 7",
        "%%distributed --explore\n7",
        "%%distributed --profile\nprofiled = 7",
    )
    made["cells"] += [{"cell_type": "code", "source": source} for source in simulated]
    (tmp_path / file).write_text(json.dumps(made))
    assert run(file) == 0
    text = (tmp_path / "train.py").read_text()
    said = "left out: with --simulate the ranks do not run it. Remove --simulate to export it"
    assert f"# cell 2 is {said}:\n#     %%distributed -n 1024 --simulate --seed 3\n" in text
    assert "mpiexec -n 8 " in text
    assert {"mine", "profiled"} & {*compile(text, "train.py", "exec").co_names} == {"profiled"}
    listed = capsys.readouterr().err
    assert f"cell 2: {said}\n" in listed
    assert "cell 3: left out: with --explore the ranks do not run it." in listed


@pytest.mark.parametrize("lab", SIMULATED, ids=lambda lab: lab.stem)
def test_a_notebook_of_simulated_ranks_only_is_refused_with_what_to_remove(lab, tmp_path):
    with pytest.raises(SystemExit, match=r"found none for a script .* Remove --simulate to"):
        main(["export", str(lab), "-o", str(tmp_path / "n.py")])


@pytest.mark.parametrize("path", sorted({*LABS}.difference(SIMULATED)), ids=lambda path: path.stem)
def test_every_lab_can_be_exported(path):
    made = [*cells_of(json.loads(path.read_text()))]
    compile(export_script(made, path.name, "n.py", "").source, "n.py", "exec")
