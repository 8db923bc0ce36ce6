"""Language models run by vLLM: `model.json` has the arguments of its engine.

`runtime` owns vLLM. `engine` generates texts with it, `encoder` computes vectors and scores, `parameters` translates a
request, and `settings` reads the configuration.
"""
