"""The transports of arrays on GPUs: NCCL, staging through pinned host memory, and memory that ranks
share on one GPU.

No module here imports cupy before an array on a GPU, or a GPU's transport, has been asked for.
"""
