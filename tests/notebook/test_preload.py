"""Ranks begin with the modules that they were told to."""

from __future__ import annotations


def test_a_module_is_there_before_the_first_cell(kernel):
    kernel.run("%load_ext allranks")
    cell = kernel.run(
        "%%distributed -n 2 --preload mailbox,allranks.collectives.model\n"
        "import sys\n"
        "[name in sys.modules for name in ('mailbox', 'allranks.collectives.model')]"
    )
    assert "ranks 0–1 → [True, True]" in cell.text
    other = kernel.run("%%distributed --preload wave\npass")
    assert "--preload wave was asked for, but --preload mailbox," in other.text
    restarted = kernel.run("%distributed restart --preload wave")
    assert restarted.status == "ok", restarted.text
    cell = kernel.run("%%distributed\nimport sys\n'wave' in sys.modules, 'mailbox' in sys.modules")
    assert "ranks 0–1 → (True, False)" in cell.text


def test_a_module_that_is_not_installed_is_named_before_anything_starts(kernel):
    kernel.run("%load_ext allranks")
    cell = kernel.run("%%distributed --preload no_such_module\npass")
    assert cell.text.startswith("MissingDependency: expected no_such_module to preload")
    cell = kernel.run("%%distributed --preload not-a-name\npass")
    assert cell.text.startswith("UsageError: expected names of modules, found 'not-a-name'")
    assert kernel.children() == []


def test_a_module_that_cannot_be_imported_says_so_in_its_cell(kernel):
    (kernel.cwd / "broken_module.py").write_text("raise RuntimeError('broken by itself')")
    kernel.run("%load_ext allranks\nimport os, sys\nos.environ['PYTHONPATH'] += ':' + os.getcwd()")
    cell = kernel.run("%%distributed -n 1 --preload broken_module\nimport broken_module")
    assert "RuntimeError: broken by itself" in cell.text


def test_the_members_of_an_ensemble_begin_with_them_too(kernel):
    kernel.run("%load_ext allranks")
    cell = kernel.run(
        "%%ensemble x=0:2 -n 2 --preload mailbox\nimport sys\nresult = 'mailbox' in sys.modules"
    )
    assert cell.status == "ok", cell.text
    assert kernel.run("print([member.result for member in runs])").text.strip() == "[True, True]"
