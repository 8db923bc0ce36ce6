"""Terminal input and output: inputs for models, their outputs, and tables.

The CLI, `shmserve run` and the server's log share it. `inputs` converts arguments, JSON and .npy files to arrays that
fit a model's metadata. After the request, `output` prints the results as a table or as JSON, or writes them to files.
`tables` formats text and numbers, and `errors` defines the exceptions that end a command with one line.
"""
