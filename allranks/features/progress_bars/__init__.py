"""Progress bars of tqdm and rich, as text."""
