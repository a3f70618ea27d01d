"""ipyparallel's clients: which ranks they find, and their requests on a rank."""
