"""Traces for OpenTelemetry: a process that creates spans of traced requests and exports them.

The broker sends a `SpanRecord` for each traced request, and never waits for the process, which has a bounded queue for
records that the collector does not accept yet. `settings` are those of `--trace-config`, `records` the messages between
broker and process. `spans` creates the spans of a request, `export_queue` exports records from a thread, and `exporter`
is the process. Only `spans` and `exporter` import OpenTelemetry, which the extra `otel` installs.
"""
