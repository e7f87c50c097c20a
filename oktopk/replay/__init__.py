"""Steps replayed on more ranks than there are, over a model of the network.

The library's own functions run without values.

`valueless` has the arrays, kernels and transport of such a run, `recording` runs a step of one rank
and records what it sends, waits for and computes. `program` makes one program of the records of all
ranks, `engine` runs it under LogGOPS, `network` holds the parameters, and `prediction` joins these.
"""
