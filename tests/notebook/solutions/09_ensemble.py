# %% 1
soft = allreduce(p).argmax(axis=1)

# %% 2
weakest = np.argmin(accuracies)
others = np.mean(most_votes(np.delete(guesses, weakest, axis=0)) == y_test)
