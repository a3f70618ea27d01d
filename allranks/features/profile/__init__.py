"""The profile of a cell: where its ranks have spent their time, as stacks of frames."""

#: Each costs some 0.2 ms where Python is busy: two threads have to take turns twice.
SAMPLES_A_SECOND = 50
