# %% 1
from collections import Counter

late = Counter(record.last_rank for record in records() if record.name == "who is late?")
culprit = late.most_common(1)[0][0]

# %% 2
few = [
    gpus
    for gpus in mine
    if predict_step(
        vgg.alone_seconds, vgg.gradient_nbytes, gpus, gpus // 4, P100_25GBE, overlap=overlap
    ).efficiency
    < 0.7
]
fewest = int(allreduce(min(few, default=513), op=Min))
