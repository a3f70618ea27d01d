"""Progress bars of tqdm and rich, as text, and one line for those of several ranks."""
