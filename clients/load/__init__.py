"""The load generator of `shmserve bench`: it measures any server that speaks the native protocol or KServe v2.

A `plan` says what to send where, and for how long. `measure` carries it out: it starts generator processes
(`generators`), which build the requests (`request_data`) and send them through a target (`targets`) at the times of a
`schedule`. They return the times of each request, which `windows` groups; `confidence` decides when the results are
stable, `search` which load comes next. The outcome is a `record`: the saved run, which `report` prints and
`compare` compares with another. Everything but `generator`, `generators`, `measure`, `usage` and `targets` is pure.
"""
