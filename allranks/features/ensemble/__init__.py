"""One cell for many members, each with values of its own."""
