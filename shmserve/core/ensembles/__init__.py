"""Ensembles: requests that run as a graph of steps, each of which is a request to another model.

`readiness` makes an ensemble READY when the models of its steps are. `begin` creates a `run` for a request, which fixes
the versions of all steps. `advance` starts each step when its inputs are there, `steps` builds the request for it, and
the results lead to further steps until the caller can be answered. `graph` contains the stateless part: dependencies,
shapes and rows.
"""
