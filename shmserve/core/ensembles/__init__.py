"""Ensembles: requests that run as a graph of steps, each of which is a request to another model.

`readiness` makes an ensemble READY when the models of its steps are READY. `begin` creates a `run` for a request and
fixes the versions of all its steps. `advance` starts each step when its inputs exist, `steps` builds the step's
request, and the results start further steps until the caller can be answered. `graph` contains the stateless part:
dependencies, shapes and rows.
"""
