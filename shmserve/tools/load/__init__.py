"""The load generator of `shmserve bench`: it measures any server that speaks the native protocol, KServe v2, or an
OpenAI API.

A `plan` defines what to send where, and for how long. `measure` carries it out: generator processes (`generation`) send
the requests through a target (`targets`) and return the times of all responses, which `analysis` turns into results;
`measure` also chooses the next load of a search. The outcome is a `record`: the saved run, which `report` prints.
`calibration` measures the generator itself, against an `echo` server.
"""
