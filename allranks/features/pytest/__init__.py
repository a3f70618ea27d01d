"""Tests on ranks: ``pytest --nranks 4``. pytest's own process sends each test, ranks run it."""
