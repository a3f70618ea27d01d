"""The profile of a cell: where its ranks have spent their time, as stacks of frames."""

#: Each costs some 0.2 ms where Python is busy: two threads have to take turns twice.
SAMPLES_A_SECOND = 50

#: Requests that ranks answer while a cell runs: sample the stacks for ``seconds``, or 0 for all of
#: the cell, the one that runs, else the next; and end that, and return the samples.
PROFILE, PROFILED = "profile", "profiled"
