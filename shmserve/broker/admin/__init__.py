"""Answers queries about the server and its models.

The core checks the roles for a query and passes it on as an effect. `answers` passes operations to `models.operations`,
and defers other queries that depend on the disk, on loading, or on a model's readiness check (`readiness_probes`).
`queries` builds the JSON from the core's tables. Equal queries in a turn share one answer.
"""
