"""Language models in GGUF files, run by llama.cpp: `model.gguf`.

A request passes through `backend`, which assigns it slots of the engine's batch; `requests` and `sampling`, which
translate its tensors for the engine; `engine`, which owns llama.cpp; and `replies`, which turns the engine's output
into responses. `files` reads the header of a GGUF file, and `settings` the parameters of the configuration.
"""
