"""Validation of configurations beyond syntax.

`fields.validate` applies all rules for one completed configuration, those of `schedulers`, `data` and `padding`
included, and `fields.verify_completed` for one that its model has completed. `ensembles` checks that the models of an
ensemble fit together.
"""
