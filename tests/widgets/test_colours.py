"""Colours: each has one meaning, and people with any kind of colour vision tell them apart."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from allranks.widgets import palette
from allranks.widgets.dashboard import svg
from allranks.widgets.dashboard.saved_panel import FRONT

ALL = palette._PALETTE
THEMES = ("light", "dark")
#: Of pages: JupyterLab's, and that of a page that follows the system.
PAPERS = {"light": ("#ffffff",), "dark": ("#111111", "#212121")}
#: JupyterLab's paper and what is raised on it.
GROUNDS = {"light": ("#ffffff", "#eeeeee"), "dark": ("#212121", "#424242")}

#: What people see who lack one kind of cones, in linear RGB.
#: Source: Machado, Oliveira and Fernandes, 2009, severity 1.
VISIONS = {
    "usual": np.eye(3),
    "without red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
         [-0.003882, -0.048116, 1.051998]]
    ),
    "without green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
         [-0.011820, 0.042940, 0.968881]]
    ),
    "without blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
         [0.004733, 0.691367, 0.303900]]
    ),
}  # fmt: skip
#: From linear RGB to Oklab. Source: Ottosson, "A perceptual color space for image processing".
TO_CONES = np.array(
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
     [0.0883024619, 0.2817188376, 0.6299787005]]
)  # fmt: skip
TO_LAB = np.array(
    [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
     [0.0259040371, 0.7827717662, -0.8086757660]]
)  # fmt: skip


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def distance(one: str, other: str, vision: str = "usual") -> float:
    """The distance in Oklab, in which black and white are 1 apart."""
    places = [
        TO_LAB @ np.cbrt(TO_CONES @ np.clip(VISIONS[vision] @ linear(colour), 0, 1))
        for colour in (one, other)
    ]
    return float(np.linalg.norm(places[0] - places[1]))


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2.2, between 1 and 21."""
    luminances = [float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other)]
    low, high = sorted(luminances)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_of_time_differ_with_any_kind_of_colour_vision(theme, vision):
    pairs = combinations(ALL["time"][theme], 2)
    assert [pair for pair in pairs if distance(*pair, vision) < 0.14] == []


@pytest.mark.parametrize("theme", THEMES)
def test_no_kind_of_time_looks_like_a_rank_or_an_error(theme):
    errors = re.findall(r"--ar-error: (#\w{6})", (FRONT / "front.css").read_text())
    taken = [*ALL["ranks"][theme], errors[THEMES.index(theme)]]
    pairs = [(kind, other) for kind in ALL["time"][theme] for other in taken]
    assert [pair for pair in pairs if distance(*pair) < 0.07] == []


@pytest.mark.parametrize("theme", THEMES)
def test_shapes_and_the_words_in_them_stand_out(theme):
    for colour in (*ALL["time"][theme], *ALL["ranks"][theme]):
        assert min(contrast(colour, paper) for paper in PAPERS[theme]) >= 3, colour
    worst, best = (f"#{3 * f'{grey:02x}'}" for grey in ALL["worstToBest"][theme])
    assert min(contrast(worst, paper) for paper in PAPERS[theme]) >= 3
    assert distance(worst, best) > 0.4
    # The rank that was waited for is written in black on the wait.
    assert contrast(ALL["time"][theme][palette.KINDS.index("waiting")], "#000000") >= 4.5


def test_words_stand_out_on_what_is_below_them_in_both_themes():
    assert min(contrast(colour, svg.PAPER) for colour in (svg.INK, svg.WRONG)) >= 4.5
    found = re.findall(r"(--ar-\w+): (#\w{6});", (FRONT / "front.css").read_text())
    names = list(dict(found))
    light, *dark = [dict(found[at : at + len(names)]) for at in range(0, len(found), len(names))]
    # Dark is said twice: of JupyterLab, and of pages that follow the system.
    assert len(dark) == 2
    assert dark[0] == dark[1]
    for theme, colours in (("light", light), ("dark", dark[0])):
        for name in ("--ar-good", "--ar-error"):
            assert min(contrast(colours[name], ground) for ground in GROUNDS[theme]) >= 4.5, name
        kinds = dict(zip(palette.KINDS, ALL["time"][theme], strict=True))
        used = colours["--ar-wait"], colours["--ar-transfer"]
        assert used == (kinds["waiting"], kinds["transfer"])
