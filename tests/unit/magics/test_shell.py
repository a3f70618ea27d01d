"""What the extension changes in the cells of IPython's shell."""

from contextlib import ExitStack

from IPython.core.interactiveshell import InteractiveShell

from allranks.magics.shell import load_once

LOAD = "%load_ext allranks"
AGAIN = "The allranks extension is already loaded."


def test_a_second_load_of_the_extension_prints_nothing(monkeypatch, capsys):
    shell, loads = InteractiveShell(), []
    monkeypatch.setattr("allranks.load_ipython_extension", loads.append)
    monkeypatch.setattr("allranks.unload_ipython_extension", lambda shell: None)

    def output(cell):
        result = shell.run_cell(cell)
        assert result.success
        assert result.result is None
        return capsys.readouterr().out

    with ExitStack() as undo:
        load_once(shell, undo)
        assert output(LOAD) == output(LOAD) == ""
        assert output(f"if True:\n    {LOAD}\n    print(1)") == "1\n"
        assert len(loads) == 1
        # Within one cell, too.
        assert output(f"%unload_ext allranks\n{LOAD}") == ""
        assert len(loads) == 2
        # Other extensions, and texts.
        shell.run_cell("%load_ext storemagic")
        assert "already loaded" in output("%load_ext storemagic")
        assert output(f"print({LOAD!r})") == f"{LOAD}\n"
    assert output(LOAD).startswith(AGAIN)
