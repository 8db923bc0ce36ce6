"""Language models run by vLLM: `model.json` has the arguments of its engine.

`engine` owns vLLM, `parameters` translates a request for it, and `settings` reads the configuration.
"""
