"""Writes what a dashboard shows into files, beside the notebook."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path

from allranks.widgets.dashboard.figures import Figures
from allranks.widgets.dashboard.logs import Logs


def save(figures: Figures, logs: Logs) -> str:
    """Writes curves, timings and where the logs are; returns the new folder, or why there is none.

    Args:
        figures: what ranks have told.
        logs: the ranks' output, whose files stay where they are.
    """
    folder = Path(time.strftime("allranks-%Y%m%d-%H%M%S"))
    try:
        folder.mkdir(exist_ok=True)
        with (folder / "curves.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            second = "rank" if figures.noun == "member" else "member"
            rows.writerow(["name", figures.noun, second, "step", "value"])
            for key, series in sorted(figures.curves.series.items(), key=lambda pair: pair[0]):
                for step, value in zip(series.steps, series.values, strict=True):
                    rows.writerow([*key, step, value])
        with (folder / "timings.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            calls = figures.timings.by_call()
            rows.writerow(vars(calls[0]) if calls else ["op"])
            rows.writerows(vars(call).values() for call in calls)
        if figures.members is not None:
            with (folder / "members.csv").open("w", newline="") as file:
                rows = csv.writer(file)
                told = figures.members.everything()["rows"]
                rows.writerow(told[0] if told else ["number"])
                rows.writerows(row.values() for row in told)
        about = {"ranks": figures.tiles.everything(), "logs": logs.paths}
        (folder / "cell.json").write_text(json.dumps(about, indent=1))
    except OSError as error:
        return f"nothing was saved: {error}"
    return f"saved in {folder.resolve()}"
