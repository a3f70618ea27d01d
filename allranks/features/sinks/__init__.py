"""What the ranks report, in tools of others: values of ``log(…)``, spans of cells and calls."""
