"""Model versions and their worker processes.

`deployment` handles deploy, unload and restart: it creates new generations next to those that serve and swaps them when
they are READY. `loading` starts their processes, and `retirement` ends the old ones when they have finished.
`lifecycle` handles what happens to processes: loading (`load_results`), crashes, restarts with back-off, and the drain
at shutdown. `unhealthy` holds the instances of GPUs that must not be used.
`handover` moves queued requests from a replaced generation to the new one, and `termination` kills workers. `model`
contains the records of models and operations.
"""
