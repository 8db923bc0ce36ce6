"""Language models in GGUF files, run by llama.cpp: `model.gguf`.

`engine` owns llama.cpp, `parameters` translates a request for it, and `pieces` reads its output. `encoder` serves
models that do not generate. `files` reads the header of a GGUF file, and `settings` the parameters of the
configuration.
"""
