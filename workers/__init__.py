"""The worker process: runs one instance of one model.

`main` starts the process and opens the link to the broker, `loading` loads the model with its backend, and `loop`
processes orders until Stop. Each Execute order is a batch: `runner` has `batch.gather` read the inputs from shared
memory, calls the backend, and has `batch.results` place the outputs in `output_arenas`. Messages leave through `outbox`
and `link`. A worker exchanges messages with the broker and never imports the broker or the core.
"""
