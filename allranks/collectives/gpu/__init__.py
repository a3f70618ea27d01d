"""The transports of arrays on GPUs: NCCL, and staging through pinned host memory.

No module here imports cupy before an array on a GPU, or a GPU's transport, has been asked for.
"""
