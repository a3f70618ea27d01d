"""A rank's GPU: which one it sees, how it is used, and what a failed cell left in its memory."""
