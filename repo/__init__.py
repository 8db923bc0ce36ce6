"""Model repositories: `storage` finds models and their versions, `config` parses and completes configurations, and
`rules` validates them.

`load` combines these steps for one configuration, and `compile` turns the result into the core's policy and the specs
of worker processes. `files` reads the files that a configuration names, `onnx` parses model files, and `check` collects
the problems of whole repositories.
"""
