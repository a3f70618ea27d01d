"""What requests of clients in a notebook, and what ranks send them, have in addition."""

#: The number of a call of a view, in all of its requests: later ones of a client have higher ones.
CALL = "allranks_call"
#: That the client sends nothing else before all of them have been answered.
BLOCKS = "allranks_blocks"
#: The rank that gives a notice, for instance that it waits for another one.
NOTICE_OF = "allranks_notice_of"

#: ipyparallel's own, only in requests of load-balanced views, which any free engine may run.
TASK_RETRIES = "retries"

#: In what a client reads to connect: that its engines are ranks.
OF_RANKS = "allranks"
#: In an interrupt: the requests that it is for, also if they have yet to begin.
REQUESTS = "allranks_requests"
#: Or the client whose request it is for, if the rank runs one. Without both it is for any request.
CLIENT = "allranks_client"
#: With it, a cell's number: then it is not for what the rank has begun after that cell.
CELL = "allranks_cell"
#: In the answer, if the rank runs another one: what it runs, in words; "" for nothing.
RUNS = "allranks_runs"
#: The notebook that has made a request, or whose ranks a file for clients leads to, for people.
NOTEBOOK = "allranks_notebook"
