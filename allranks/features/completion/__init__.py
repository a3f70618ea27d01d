"""Tab, Shift-Tab and ``name?`` in cells for the ranks, answered by one of them."""
