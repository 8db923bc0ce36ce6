"""Models in the repositories: which ones are deployed, operations on them, and changes on disk.

`operations` receives load calls, whose bodies (`overrides`) arrive in pieces, and lets a thread (`reader`) read the
model from the `repositories`, after a download if it is in a remote one (`remote`, `remote_changes`). The `catalog`
turns the result into events for the core, which starts workers and reports when the operation has finished.
`disk_changes` does the same for what a poll (`poller`) or SIGHUP finds. `ensemble_members` finds the models of an
ensemble's steps, which are loaded with it. `differences` compares loaded versions with the files on disk.
"""
