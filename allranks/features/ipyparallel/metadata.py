"""What requests of clients in a notebook, and what ranks send them, have in addition."""

#: The number of a call of a view, in all of its requests: later ones of a client have higher ones.
CALL = "allranks_call"
#: That the client sends nothing else before all of them have been answered.
BLOCKS = "allranks_blocks"
#: The rank that gives a notice, for instance that it waits for another one.
NOTICE_OF = "allranks_notice_of"

#: In what a client reads to connect: that its engines are ranks.
OF_RANKS = "allranks"
#: In an interrupt: the only requests that it concerns.
REQUESTS = "allranks_requests"
#: In the answer, if the rank runs none of them: what it runs, in words; "" for nothing.
RUNS = "allranks_runs"
