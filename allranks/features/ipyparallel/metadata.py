"""What requests of clients in a notebook, and the output of ranks, carry in their metadata."""

#: The number of a call of a view, in all of its requests: later ones of a client have higher ones.
CALL = "allranks_call"
#: That the client sends nothing else before all of them have been answered.
BLOCKS = "allranks_blocks"
#: The rank that gives a notice, for instance that it waits for another one.
NOTICE_OF = "allranks_notice_of"
