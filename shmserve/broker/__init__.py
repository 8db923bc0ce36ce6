"""The broker process: connects the core to clients, workers, repositories and the clock.

`listeners` accepts clients, and `link` reads their packets; `peers` keeps what arrives and leaves between two turns.
`loop` passes the decoded messages to the core once per turn and carries out the effects that it returns: messages to
links, processes to start (`instance_workers`), models to load. `processes` starts and watches workers and gateways,
`models` reads the repositories. `admin` answers queries, `observability` provides metrics, traces and logs. `config`
parses the settings. `startup` checks the prerequisites, and `main` builds all of this from the settings.
"""
