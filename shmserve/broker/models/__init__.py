"""The models of the repositories: what is deployed, operations on models, and changes on disk.

A load call arrives in pieces (`overrides`) at `operations`, which has `catalog` read the model in a thread. The catalog
turns the reading into events for the core, which starts workers and later reports that the operation has settled. Polls
(`poller`) and SIGHUP take the same path. `ensemble_members` also loads the models of an ensemble's steps.
`differences` compares loaded versions with the files on disk.
"""
