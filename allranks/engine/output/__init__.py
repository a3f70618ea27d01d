"""What a rank prints and displays: to its log, and on to the notebook."""
