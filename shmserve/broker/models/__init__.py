"""The models of the repositories: what is deployed, operations on them, and changes on disk."""
