"""Language models in GGUF files, run by llama.cpp: `model.gguf`.

`backend` has the classes for models that generate and for those that do not. `engine` owns llama.cpp, `parameters`
translates a request for it, and `pieces` reads its output. `settings` reads the parameters of the configuration.
"""
