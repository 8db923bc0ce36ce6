"""Metrics, traces, logs, and notifications to the service manager.

`metrics` builds the Prometheus text on request, with the families of `metric_definitions` and the metrics that models
define (`model_metrics`). `logs` writes the log, and `log_throttle` limits the output of child processes. The core
reports traced requests, and `traces` writes them to a file. `service_status` sends notifications to systemd; `progress`
reports the initial loading on the console.
"""
