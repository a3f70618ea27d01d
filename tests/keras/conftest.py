"""Excludes the suites in ``ranks/``, which `test_backends` runs under mpiexec."""

from tests.torch.conftest import python  # noqa: F401

collect_ignore = ["ranks"]
