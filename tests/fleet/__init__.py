"""Several servers behind a real HAProxy and a real Envoy, as deploy/balancers configures them: `make test-fleet`.

`programs` finds the balancers or puts them into build/fleet, `balancers` runs one, `load` is what clients send.
"""
