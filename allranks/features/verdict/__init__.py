"""One sentence below a cell with a loop of collectives: why it is slow, or wrong.

A rank gathers what it has recorded of the cell (`rank.py`). The notebook asks for it when such a
cell has ended (`notebook.py`), and pure functions of these records find the cause (`rules.py` and
`results.py`). Standard library only.
"""

#: The request that a rank answers with its part of a cell, see `RankVerdict.answer`.
MEASURED = "measured"

#: The request for checks in the next cell; ``what`` is ``nan`` or ``weights``.
CHECK = "check"

#: Where its value is ``off``, no cell is judged.
VARIABLE = "ALLRANKS_VERDICT"

#: A loop with fewer steps is not judged.
LEAST_STEPS = 20
