"""The lecture of docs/teaching.md: a teacher and four students in JupyterLab, in some minutes.

python -m tests.browser.lecture      # Linux, as root; pictures of each step in test-results/lecture

Everyone has an account and a server on a JupyterHub with the configuration of docs/jupyterhub.md.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

from nbformat.v4 import new_code_cell, new_notebook
from playwright.sync_api import Browser, Locator, expect, sync_playwright

from tests import labs
from tests.browser.chromium import MISSING, find_chromium
from tests.browser.lab import CHROMIUM_ARGS, KERNELSPEC, SETTINGS, Lab
from tests.hub.hub import Hub

# Five seconds, as Playwright has it, are not enough for five notebooks on two cores.
expect.set_options(timeout=60_000)

PICTURES = Path("test-results") / "lecture"
TEACHER, STUDENTS, LAB = "tina", ("ana", "ben", "eva", "zoe"), "01_ranks"
VIEWPORT = {"width": 1280, "height": 900}
ADDITIONS = """
MAX_RANKS, MAX_PROCESSES, MAX_NBYTES = 4, 400, 4 << 30
c.Spawner.environment["ALLRANKS_MAX_RANKS"] = str(MAX_RANKS)
del c.Spawner.environment["ALLRANKS_CLASS_URL"]  # all accounts are on one machine
c.Spawner.args += [
    "--LabApp.expose_app_in_browser=True", "--LabApp.app_settings_dir={settings}"
]
"""
TOGETHER = (
    "hello",
    "secret",
    "shares",
    "counts",
    "allreduce",
    "watch",
    "one-raises",
    "death",
    "replaced",
)
"""The cells of the lab that everyone runs together."""

START = """%%distributed
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
images = digits.images[rank::size]
labels = digits.target[rank::size]

"""
RIGHT = START + labs.solutions(LAB)["1"]
ANSWERS = {
    "ana": RIGHT,
    "ben": START + "counts = np.bincount(labels)\n"
    "while rank == 1 and counts.max() < 60:  # no image is ever added\n    pass\n"
    "most = allreduce(counts.max(), op=Max)",
    "eva": START + "def most_of_a_digit(labels):\n    return np.bincount(labels).max()",
    "zoe": START + "import ctypes\n\nif rank == 2:\n    ctypes.string_at(0)  # a crash\n"
    "most = allreduce(np.bincount(labels).max(), op=Max)",
}


class ClassView:
    """What ``%distributed class`` shows in a cell of the teacher's notebook."""

    def __init__(self, shown: Locator) -> None:
        self._shown = shown
        self.tiles = shown.locator(".ar-class > div")

    def tile(self, name: str) -> Locator:
        return self.tiles.filter(has_text=name)

    def open(self, name: str) -> None:
        chooser = self._shown.locator("select")
        options = chooser.locator("option").all_text_contents()
        chooser.select_option(label=next(text for text in options if name in text))

    def expect_panel(self) -> None:
        frame = self._shown.frame_locator("iframe")
        expect(frame.locator("img, svg").first).to_be_visible()

    def expect_ranks(self, name: str) -> None:
        ranks = self._shown.locator(f"b:text-is('{name}') + pre")
        expect(ranks.filter(has_text="rank 1")).to_be_visible()


class Lecture:
    """The people of a lecture, each with a page of JupyterLab."""

    def __init__(self, hub: Hub, browser: Browser, homes: Path) -> None:
        self._hub, self._homes = hub, homes
        self.labs: dict[str, Lab] = {}
        for name in (TEACHER, *STUDENTS):
            page = browser.new_context(viewport=VIEWPORT).new_page()
            self._sign_in(page, name)
            server = SimpleNamespace(url=f"{hub.url}/user/{name}", token="", root=homes / name)
            self.labs[name] = Lab(page, server)
        self.students = {name: self.labs[name] for name in STUDENTS}
        self._began, self._pictures = time.monotonic(), 0

    def _sign_in(self, page, name: str) -> None:
        page.goto(f"{self._hub.url}/hub/login")
        page.locator("#username_input").fill(name)
        page.locator("#password_input").fill("secret")
        page.locator("#login_submit").click()
        page.wait_for_url(f"**/user/{name}/**", timeout=120_000)

    def write(self, name: str, notebook: str, *sources: str) -> None:
        """Puts a notebook into a home, as its owner could have written it."""
        path = self._homes / name / notebook
        written = new_notebook(cells=[new_code_cell(source) for source in sources])
        path.write_text(json.dumps({**written, "metadata": {"kernelspec": KERNELSPEC}}))
        shutil.chown(path, (self._homes / name).stat().st_uid)

    def picture(self, name: str, what: str) -> None:
        self._pictures += 1
        path = PICTURES / f"{self._pictures:02}-{what}-{name}.png"
        self.labs[name].screenshot(path)
        print(f"{time.monotonic() - self._began:5.0f} s  {path}", flush=True)


def index_of(lab: Lab, cell: str) -> int:
    """Returns the place of a cell, by its id."""
    found = lab.page.evaluate(
        "id => jupyterapp.shell.currentWidget.content.widgets.findIndex(c => c.model.id === id)",
        cell,
    )
    assert found >= 0, f"expected the cell {cell} in {lab.page.url}, found none"
    return int(found)


def run_everywhere(people: Mapping[str, Lab], cell: str) -> None:
    """Runs a cell in each notebook at the same time, and waits for all."""
    for lab in people.values():
        lab.run_cell(index_of(lab, cell))
    for lab in people.values():
        lab.wait_idle(300)


def prepare(lecture: Lecture) -> ClassView:
    """Minutes 0 to 5: the teacher opens the class; students check, copy the labs and join."""
    teacher = lecture.labs[TEACHER]
    lecture.write(TEACHER, "class.ipynb", "%load_ext allranks", "%distributed class")
    teacher.open("class.ipynb")
    teacher.run_all()
    teacher.wait_for(1, "No student has joined yet.")
    for name, lab in lecture.students.items():
        lecture.write(name, "start.ipynb", "!allranks doctor", "!allranks labs")
        lab.open("start.ipynb")
        lab.run_all()
    for lab in lecture.students.values():
        lab.wait_for(1, "labs were copied to", timeout=90)
        lab.wait_idle()
    lecture.picture("ana", "install")
    for name, lab in lecture.students.items():
        lab.close()
        lab.open(f"{LAB}.ipynb")
        run_everywhere({name: lab}, "load")
        lab.command("notebook:insert-cell-below")
        join = index_of(lab, "load") + 1
        lab.write(join, f"%distributed join {TEACHER}" + " panel" * (name == "eva"))
        lab.run_cell(join)
        lab.wait_for(join, "To stop: %distributed leave")
    shown = ClassView(teacher.output(1))
    expect(shown.tiles).to_have_count(len(STUDENTS))
    lecture.picture(TEACHER, "joined")
    return shown


def teach(lecture: Lecture, shown: ClassView) -> None:
    """Minutes 5 to 25: everyone runs the lab, cell by cell; the teacher looks at a panel."""
    for cell in TOGETHER:
        run_everywhere(lecture.students, cell)
        if cell == "watch":
            shown.open("eva")
            shown.expect_panel()
        if cell in ("hello", "watch", "death"):
            lecture.picture("ana", cell)
            lecture.picture(TEACHER, f"during-{cell}")


def exercise(lecture: Lecture, shown: ClassView) -> None:
    """Minutes 25 to 40: one answer is right, one wrong; one hangs, and in one a rank dies."""
    for name, lab in lecture.students.items():
        place = index_of(lab, "exercise-1")
        lab.write(place, ANSWERS[name])
        lab.run_cell(place)
        if name in ("ana", "eva"):
            lab.wait_idle()
            lab.run_cell(index_of(lab, "check-1"))
    for name in ("ana", "eva"):
        lecture.labs[name].wait_idle()
    lecture.labs["ana"].wait_for(index_of(lecture.labs["ana"], "check-1"), "right:")
    expect(shown.tile("zoe")).to_contain_text("rank 2")
    expect(shown.tile("zoe")).to_contain_text("SIGSEGV")
    expect(shown.tile("eva")).to_contain_text("expected 1 call of allreduce")
    expect(shown.tile("ana")).to_contain_text("idle")
    expect(shown.tile("ana")).to_contain_text("exercise 1")
    expect(shown.tile("ben")).to_contain_text("waits", timeout=90_000)
    expect(shown.tile("ben")).to_contain_text("for rank 1")
    order = [text.split()[0] for text in shown.tiles.all_inner_texts()]
    assert (set(order[:2]), order[2:]) == ({"zoe", "eva"}, ["ben", "ana"]), order
    for name in STUDENTS:
        lecture.picture(name, "exercise")
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lecture.labs[TEACHER].choose_theme(theme)
        lecture.picture(TEACHER, f"class-{theme.split()[1].lower()}")
    shown.open("ben")
    shown.expect_ranks("ben")
    lecture.picture(TEACHER, "opened-ben")


def end(lecture: Lecture, shown: ClassView) -> None:
    """Minutes 40 to 45: everyone has the right answer, and leaves."""
    lecture.labs["ben"].interrupt()
    for lab in lecture.students.values():
        lab.wait_idle()
        place = index_of(lab, "exercise-1")
        lab.write(place, RIGHT)
    for cell in ("exercise-1", "check-1"):
        run_everywhere(lecture.students, cell)
    for lab in lecture.students.values():
        lab.wait_for(index_of(lab, "check-1"), "right:")
    expect(shown.tiles.filter(has_text="idle")).to_have_count(len(STUDENTS))
    lecture.picture(TEACHER, "all-right")
    for lab in lecture.students.values():
        place = index_of(lab, "stop")
        lab.write(place, "%distributed leave\n%distributed stop")
        lab.run_cell(place)
    for lab in lecture.students.values():
        lab.wait_for(index_of(lab, "stop"), "The ranks are stopped.")
    expect(shown.tiles.filter(has_text="left")).to_have_count(len(STUDENTS))
    lecture.picture(TEACHER, "left")
    lecture.picture("zoe", "left")


@contextmanager
def opened() -> Iterator[Lecture]:
    """Opens JupyterLab for everyone, on a hub with their accounts."""
    path = find_chromium()
    if path is None:
        raise SystemExit(MISSING)
    folder = Path(tempfile.mkdtemp(prefix="lecture-"))
    settings = {f"@jupyterlab/{name.replace('/', ':')}": it for name, it in SETTINGS.items()}
    (folder / "settings").mkdir()
    (folder / "settings" / "overrides.json").write_text(json.dumps(settings))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        additions = ADDITIONS.format(settings=folder / "settings")
        hub = stack.enter_context(Hub(folder, (TEACHER, *STUDENTS), additions))
        hub.start(TEACHER, *STUDENTS)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        stack.callback(browser.close)
        yield Lecture(hub, browser, folder / "homes")


def main() -> None:
    shutil.rmtree(PICTURES, ignore_errors=True)
    with opened() as lecture:
        try:
            shown = prepare(lecture)
            teach(lecture, shown)
            exercise(lecture, shown)
            end(lecture, shown)
        except BaseException:
            for name in lecture.labs:
                lecture.picture(name, "failed")
            raise
        # Scripts of a student's panel do not run.
        said = [one for lab in lecture.labs.values() for one in lab.complaints]
        assert [one for one in said if "about:srcdoc" not in one] == []
        print("The lecture is over. Look at each picture.")


if __name__ == "__main__":
    main()
