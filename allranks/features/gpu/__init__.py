"""What a rank's GPU is used for: its figures, reports of memory that ran out, and freed memory."""
