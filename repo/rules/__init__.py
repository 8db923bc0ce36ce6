"""Validation of configurations beyond syntax.

`fields.validate` applies all rules for one completed configuration, those of `schedulers`, `data` and `padding`
included. `ensembles` checks that the models of an ensemble fit together, and `completed` validates what a model has
filled in.
"""
