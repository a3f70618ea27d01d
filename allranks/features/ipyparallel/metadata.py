"""What requests of clients in a notebook, and the output of ranks, carry in their metadata."""

#: The number of a blocking call of a view, in all of its requests.
BLOCKING_CALL = "allranks_blocking_call"
#: The rank that gives a notice, for instance that it waits for another one.
NOTICE_OF = "allranks_notice_of"
