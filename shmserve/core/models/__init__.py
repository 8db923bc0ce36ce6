"""Model versions and their worker processes.

`deployment` handles deploy, unload and restart: it creates new generations next to those that serve, swaps them when
they are READY, and retires the old ones. `lifecycle` handles the processes: loading, crashes, restarts with back-off,
and the drain at shutdown. `handover` moves queued requests from a replaced generation to the new one, and `termination`
kills workers. `model` contains the records of models and operations.
"""
