"""Models in the repositories: their deployment, operations on them, and changes on disk.

`operations` receives load calls, whose bodies (`overrides`) arrive in pieces. A thread (`reader`) reads the model from
the `repositories`, after a download if the repository is remote (`remote`, `remote_changes`). The `catalog` turns the
result into events for the core, which starts workers and reports when the operation has finished. `disk_changes` does
the same for changes that a poll (`poller`) or SIGHUP finds. `ensemble_members` finds the models of an ensemble's steps,
which are loaded with it. `differences` compares loaded versions with the files on disk.
"""
