"""Input that a cell asks for on a rank: ``input()``, ``getpass()`` and debuggers."""
