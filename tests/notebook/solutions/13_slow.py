# %% 1
causes = {"A": size - 1, "B": 0, "C": "all", "D": 1}


# %% 2
def standardised(batch):
    deviation = batch.std()
    return (batch - batch.mean()) / (deviation if deviation > 0 else 1.0)
