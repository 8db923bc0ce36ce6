"""Queries about the server and its models, and their answers.

The core checks the roles for a query and passes it on as an effect. `answers` gives operations to `models.operations`,
and lets other queries wait for the disk, for loading, or for a model's own readiness (`readiness_probes`). `queries`
builds the JSON from the core's tables. Equal queries of a turn share one answer.
"""
