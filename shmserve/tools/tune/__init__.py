"""`shmserve tune`: finds the settings of a model that hold a latency target.

`measure` runs the model with a few settings and records how long batches take, `fit` turns this into a service time for
every setting, `search` tries all settings of `space` in the simulator, and `confirm` measures the best of them on the
real server. `tuner` runs these steps; `reasons` and `report` describe the outcome. `joint` tunes several models
together; the settings of language models (`language`) and of models with sequences (`sequences`) are only measured.
Everything but `served` works on a `Bench`, for which tests use a simulated server.
"""
