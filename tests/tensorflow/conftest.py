"""Excludes the suites in ``ranks/``, which `test_under_mpiexec` runs under mpiexec."""

collect_ignore = ["ranks"]
