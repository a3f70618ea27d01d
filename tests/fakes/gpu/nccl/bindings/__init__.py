"""FAKE nccl4py, on the fake NCCL of cupy."""
