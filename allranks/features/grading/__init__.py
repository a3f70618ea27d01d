"""Where notebooks are graded: tests use functions as they were before any cell of a student.

`allranks.grading.nbgrader` begins this in the kernel (`kernel.py`), whose ranks then do the same
(`rank.py`). It undoes what cells have replaced, as ``np.array_equal = lambda *_: True``. Code that
is written against it can deceive it, because both run in the same process.
"""
