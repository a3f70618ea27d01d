"""Where a cell spends its time, by samples of the main thread's frames."""
