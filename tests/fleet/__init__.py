"""Several servers behind a real HAProxy and a real Envoy, and monitored by a real Prometheus, with the configurations
in deploy/: `make test-fleet`.

`programs` finds the programs or installs them in build/fleet, `balancers` runs a balancer, `load` generates the
clients' requests, and `rules` has promtool's test cases for the rules and alerts.
"""
