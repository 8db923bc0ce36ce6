"""Language models, whichever engine runs them.

A request passes through `backend`, which assigns it slots of the engine's batch; `requests` and `sampling`, which read
its tensors; the engine, whose interface is in `engine`; and `replies`, which turns the steps of the engine into
responses. `conversions` between text and tokens take its place for some requests. `schemas` and `image_headers` limit
what a request can cost, and `metrics` counts what the engine does. `encoder` serves models that do not generate.
"""
