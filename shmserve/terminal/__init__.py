"""Terminal input and output: inputs for models, their outputs, and tables.

The CLI, `shmserve run` and the server's log share it. `inputs` converts arguments, JSON and files to arrays that fit a
model's metadata, with `files` and `values`. After the request, `output` prints the results as a table or as JSON, or
writes them to files. `tables` formats text and numbers, `console` colours it and fits tables to a terminal, and
`help_text` lays out help. `streams` handles standard streams that are closed or full, and `errors` defines the
exceptions that end a command with one line.
"""
