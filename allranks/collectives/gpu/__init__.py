"""Arrays on a GPU: cupy's door, who sits on which GPU, and the way that bytes take.

Nothing here imports cupy before an array on a GPU, or a GPU's transport, has been asked for.
"""
