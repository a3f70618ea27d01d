"""The requests that the notebook sends to a rank; all are answered while a cell runs."""

from __future__ import annotations

#: Wait for another notebook when this one ends. It will listen in the folder ``home``.
#: If that is empty, do not wait.
STAY = "stay"
#: The notebook has shown the output of ``cell``: another one need not.
SEEN = "seen"
#: Send `Hello` again, to another notebook. The answer describes the last cell that was sent:
#: its number (``cell``) and ``label``; whether it is a ``member`` of an ensemble, whether this rank
#: is ``busy`` with it, or has ended it ``unseen``, and how many ``seconds`` it took so far; the
#: ``epoch``, whether it is ``dirty``, whether it had ``traffic``, and whether the cell ``failed``;
#: the ranks that have ``died`` and were not replaced, and whether this one is ``healing``, joining
#: with replacements, as the arguments ``heal`` of the last HEAL say; whether it is ``new`` and was
#: not asked yet to restore what was kept.
ATTACH = "attach"
#: Send the output of that cell so far, and from now on what follows.
RESUME = "resume"
