"""The collectives as users call them. Runs in every rank.

| operations | made by | moved by |
| --- | --- | --- |
| allreduce, grouped_allreduce, reduce | `reducing.begin_reduction` | `Transport.allreduce` |
| reducescatter, grouped_reducescatter | the same | `Transport.reducescatter` |
| broadcast | `operations.begin_broadcast` | `Transport.broadcast` |
| allgather, grouped_allgather, gather | `operations.begin_allgather` | `Transport.allgather` |
| scatter, alltoall | `begin_scatter`, `begin_alltoall` | `Transport.alltoall` |
| the functions for objects | `begin_object_…` | `Transport.allgather`, `alltoall` |
| barrier | `begin_barrier` | the agreement alone |

Each of these functions makes a `Call`. Public forms are thin: `run` waits for the call, `Handle`
posts it (``_async``). They are written out, so that help(), editors and the documentation show
their arguments. Ranks that have joined take part with zeros (`specs.goes_with_joined`).
"""
