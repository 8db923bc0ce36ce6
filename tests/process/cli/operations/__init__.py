"""The commands of operators: models, logs, traces, top and drain."""
