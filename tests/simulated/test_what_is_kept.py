"""The table of docs/failures.md: whose variables are kept, for each fault in each moment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.gate import REPOSITORY
from tests.simulated.scenarios import Play, reduce, simulated, work

if TYPE_CHECKING:
    from tests.simulated.chaos import ClusterWorld
    from tests.simulated.notebook import SimulatedNotebook

_HEADING = "## More than one fault\n"
#: For each moment, the step that begins it, and the ranks that were lost before it.
_MOMENTS = {
    "a cell runs": ("run", ()),
    "no notebook has the ranks": ("", ()),
    "a rank is replaced": ("heal", (0,)),
    "a new rank takes back what was kept": ("settle", (0,)),
    "ranks save their variables, after a host was lost": ("save", (4, 5)),
    "all ranks start again, and load their variables": ("load", (4, 5)),
}
#: The ranks that each fault hits.
_FAULTS = {
    "a rank dies": (3,),
    "a host is lost": (2, 3),
    "the kernel is killed, and its ranks [stay](attach.md)": (),
}
#: Of which ranks the variables are lost: those that were lost before, and those of this fault. Of
#: the second ones in brackets some may be kept.
_LOST = {
    "all": ("", ""),
    "all but its own": ("this", ""),
    "all but those of its ranks": ("this", ""),
    "all but those of the replaced rank": ("before", ""),
    "all but those of both ranks": ("before this", ""),
    "all but those of the rank and the host": ("before this", ""),
    "all but those of the lost host": ("before", ""),
    "all but those of both hosts": ("before this", ""),
    "all but those of the lost host, and its own if it had not saved them": ("before", "this"),
}


def _scenario(moment: str, fault: str, kept: str) -> Play:
    step, before = _MOMENTS[moment]
    lost = {"before": set(before), "this": set(_FAULTS[fault])}
    least, most = (set().union(*(lost[name] for name in names.split())) for names in _LOST[kept])

    def play(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
        _start(world, notebook)
        if step:
            world.when(step, lambda: _happen(world, step, fault), world.chance.uniform(0, 0.02))
            _lose(world, before)
        if not step:
            notebook.kill()
            _happen(world, step, fault)
            world.pass_time(world.chance.uniform(0, 2))
        elif _FAULTS[fault]:
            notebook.cell(reduce(seconds=1.0, sets=2))
        else:
            notebook.dies_in(reduce(seconds=1.0, sets=2))
        if not notebook.process.alive:
            assert world.new_notebook().attach(notebook)
        while world.notebook.cell(reduce(sets=3)).error:
            assert world.notebook.state == "running"
        found = {rank for rank in range(6) if "before" not in world.rank(rank).vars}
        assert least <= found <= least | most, f"lost are the variables of {found}"

    words = f"{moment} {'' if _FAULTS[fault] else 'and '}{re.sub('[(].*?[)]', '', fault)}"
    play.__name__ = "test_what_is_kept_while_" + "_".join(re.findall("[a-z]+", words))
    return play


def _start(world: ClusterWorld, notebook: SimulatedNotebook) -> None:
    notebook.start()
    notebook.stay()
    notebook.cell(work(sets=1))
    for rank in range(6):
        world.rank(rank).vars["before"] = rank


def _lose(world: ClusterWorld, ranks: tuple[int, ...]) -> None:
    """Ranks are lost in the cell that runs next: one, or those of a host."""
    if len(ranks) == 1:
        world.after(0.2, world.kill_rank, *ranks)
    elif ranks:
        world.after(0.2, world.kill_on, "h3", "agent")


def _happen(world: ClusterWorld, step: str, fault: str) -> None:
    if step == "settle":
        world.rank(0).p.freeze(0.5)  # else it would be over at once
    if fault == "a rank dies":
        world.kill_rank(3)
    elif fault == "a host is lost":
        kill = world.chance.choice([world.kill_host, lambda host: world.kill_on(host, "agent")])
        kill("h2")
    else:
        world.notebook.kill()


def _table() -> list[list[str]]:
    """Returns the cells of the table, line by line."""
    text = (REPOSITORY / "docs/failures.md").read_text().partition(_HEADING)[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


_HEAD, _, *_ROWS = _table()
for _moment, *_cells in _ROWS:
    for _fault, _kept in zip(_HEAD[1:], _cells, strict=True):
        if _kept != "–":
            _play = _scenario(_moment, _fault, _kept)
            globals()[_play.__name__] = simulated(seeds=3)(_play)


def test_the_table_has_all_moments_and_faults() -> None:
    assert [row[0] for row in _ROWS] == list(_MOMENTS)
    assert _HEAD[1:] == list(_FAULTS)
