# %% 1
def most_of_a_digit(labels):
    return allreduce(np.bincount(labels, minlength=10).max(), op=Max)


# %% 2
def inkiest_digit(images, labels):
    ink = np.bincount(labels, weights=images.sum(axis=(1, 2)), minlength=10)
    count = np.bincount(labels, minlength=10)
    return (allreduce(ink, op=Sum) / allreduce(count, op=Sum)).argmax()


# %% left-behind
import json

left = {
    "counts": [counts.tolist() for counts in all_counts],
    "means": [all_means[r].tolist() for r in sorted(all_means)],
}
print(json.dumps(left))
