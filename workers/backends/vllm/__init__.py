"""Language models run by vLLM: `model.json` has the arguments of its engine.

`runtime` owns vLLM. `engine` generates texts with it, from which `tools` reads tool calls, and `encoder` computes
vectors and scores. `parameters` translates a request, `images` checks its images, and `settings` reads the
configuration.
"""
