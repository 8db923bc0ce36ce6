"""Language models, whichever engine runs them.

A request passes through `backend`, which assigns it slots of the engine's batch; `requests` and `sampling`, which read
its tensors; the engine, whose interface is in `engine`; and `replies`, which turns the steps of the engine into
responses. `metrics` counts what the engine does.
"""
