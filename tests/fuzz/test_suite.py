"""The suite itself: steps are always the same, faults are found, and sequences get short."""

import pytest

from tests.fuzz import play
from tests.fuzz.grammar import KINDS, STATEMENTS, Act, Case, Seed
from tests.fuzz.play import shortest
from tests.fuzz.ranks import unfold

LABELLED = """
rank 0    │ zero
ranks 1–3 │ more
          │ and more
          → 7
rank 0    ! zero's error
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_depends_on_its_seed_and_number_only(kind):
    seed = Seed(kind, 3, 5)
    assert Seed.parse(str(seed)) == seed
    for step in (17, 3, 90):
        assert play.source_of(seed, step, 3) == play.source_of(seed, step, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_deck_has_every_statement_that_fits(kind):
    seed = Seed(kind, 4, 1)
    deck = sum(s.weight for s in STATEMENTS.values())
    drawn = {play.made(seed, step, 4)[0] for step in range(2 * deck)}
    fitting = {s.name for s in STATEMENTS.values() if s.only in ("", kind) and not s.soak}
    assert drawn == fitting


def test_every_case_is_python_and_every_act_can_be_done():
    for kind in KINDS:
        for step in range(300):
            _, what, _before = play.made(Seed(kind, 2, 9), step, 2)
            assert isinstance(what, Case | Act)


def test_labelled_text_is_unfolded_for_each_rank():
    more = ["more", "and more"]
    assert unfold(LABELLED) == {0: ["zero"], 1: more, 2: more, 3: more}


@pytest.mark.parametrize("culprits", [{7}, {3, 40}, {0, 11, 12, 49}])
def test_a_sequence_is_shortened_to_what_fails(culprits):
    tried = []

    def fails(steps):
        tried.append(steps)
        return culprits <= set(steps)

    assert shortest(range(50), fails) == sorted(culprits)
    assert len(tried) < 150
