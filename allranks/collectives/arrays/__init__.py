"""The values of a call: other libraries' arrays, dtypes, reductions. Runs in every rank."""
