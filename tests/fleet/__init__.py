"""Several servers behind a real HAProxy and a real Envoy, and watched by a real Prometheus, as deploy/ configures them:
`make test-fleet`.

`programs` finds the programs or puts them into build/fleet, `balancers` runs a balancer, `load` is what clients send,
`rules` are the cases of promtool for the rules and alerts.
"""
