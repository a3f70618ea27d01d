"""A profile folded over ranks: no second is lost, and what differs is found where it arises."""

import base64
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.features.profile.flame_graph import Node, Profile, by_rank, fold, page, svg, text
from allranks.features.profile.rank import packed

FRAMES = st.sampled_from(
    ["In[1]:2  f()", "f In[1]:1  g()", "g (lib)", "allreduce (allranks)", "<b>"]
)
STACKS = st.dictionaries(
    st.lists(FRAMES, min_size=1, max_size=5).map(tuple), st.floats(0.01, 100), min_size=1
)
PROFILES = st.lists(STACKS, min_size=1, max_size=5).map(
    lambda every: [Profile(rank, stacks) for rank, stacks in enumerate(every)]
)


def everything(node: Node) -> list[Node]:
    return [node, *(below for child in node.children.values() for below in everything(child))]


@given(PROFILES)
def test_folding_keeps_every_second_of_every_rank(profiles):
    folded = fold(profiles)
    for profile in profiles:
        assert folded.root.seconds[profile.rank] == pytest.approx(profile.seconds)
    for node in everything(folded.root):
        for rank in folded.ranks:
            called = sum(child.seconds.get(rank, 0.0) for child in node.children.values())
            assert called <= node.seconds.get(rank, 0.0) * (1 + 1e-9) + 1e-9


@given(PROFILES)
def test_a_profile_crosses_the_wire_and_is_collapsed_without_a_loss(profiles):
    for profile in profiles:
        assert Profile.from_content(profile.rank, packed(profile.stacks)) == profile
        told = [line.rpartition(" ")[2] for line in profile.collapsed().splitlines()]
        assert sum(map(int, told)) == pytest.approx(1e6 * profile.seconds, abs=len(told))


@given(PROFILES)
def test_frames_lie_within_the_one_that_called_them(profiles):
    root = ElementTree.fromstring(svg(fold(profiles), titled=True))
    width = float(root.get("width", "0"))
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert float(rect.get("x", "0")) >= 0
        assert float(rect.get("x", "0")) + float(rect.get("width", "0")) <= width + 0.5


def test_what_differs_is_marked_where_it_arises():
    fast = {("main", "load"): 0.2, ("main", "wait"): 0.8}
    slow = {("main", "load"): 1.0}
    folded = fold([Profile(0, fast), Profile(1, fast), Profile(2, slow)])
    assert [node.name for node in folded.differing()] == ["load", "wait"]
    assert by_rank(folded, folded.differing()[0]) == "rank 2 1 s, ranks 0–1 200 ms"
    assert not folded.differs(folded.root.children["main"])
    same = fold([Profile(rank, {("main", "step"): 1 + 0.01 * rank}) for rank in range(4)])
    assert same.differing() == []
    assert "≠" not in text(same)


def test_the_picture_needs_no_scripts_and_says_each_frame_under_the_pointer():
    shown = page(fold([Profile(0, {("<b>main", "step"): 2.0}), Profile(1, {("<b>main",): 2.0})]))
    assert not re.search("<script|<style|<svg", shown)
    (data,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)
    ElementTree.fromstring(base64.b64decode(data))
    titles = re.findall(r'<area [^>]*title="([^"]*)"', shown)
    assert [title.splitlines()[0] for title in titles] == ["all", "&lt;b&gt;main", "step"]
    assert titles[2].splitlines()[1:] == ["1 s, 50.0%", "rank 0 2 s, rank 1 0 µs"]


def test_a_flame_of_very_many_frames_stays_small():
    stacks = {
        (f"In[1]:{i % 40}", *(f"call {j} of {i}" for j in range(30))): 1.0 for i in range(900)
    }
    assert len(page(fold([Profile(rank, stacks) for rank in range(4)]))) < 400_000
