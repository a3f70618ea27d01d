"""The front end's debugger on the ranks: debugpy in each rank, and one view of all ranks."""
