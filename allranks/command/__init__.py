"""``allranks doctor``, ``export`` and ``run``. Runs in a shell."""
