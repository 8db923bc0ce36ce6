"""Traces for OpenTelemetry: a process that makes spans of traced requests and exports them.

The broker sends a `SpanRecord` for each traced request, and never waits for the process, which has a bounded queue for
what a collector does not take. `settings` are those of `--trace-config`, `records` the messages between both, `spans`
makes the spans of a request, `export_queue` holds records and exports them from a thread, and `main` is the process.
Only `spans` and `main` import OpenTelemetry, which the extra `otel` installs.
"""
