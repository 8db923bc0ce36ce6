"""The servers that a load can be put on: `native` (lane, ipc, tcp), KServe v2 over `http` and `grpc`,
and `openai` APIs of language models.

`native.open_target` chooses one by the endpoint. A target describes the model, prepares requests once, and opens
slots; a slot has one request in flight at a time and raises ServeError if it fails.
"""
