"""The values of a call: other libraries' arrays, dtypes, reductions."""
