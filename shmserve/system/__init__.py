"""This process and its machine: allocator, kernel settings, procfs, service manager.

`allocator` and `prctl` change settings of the calling process. `procfs` reads the CPU time and memory of processes and
of the machine. `service_manager` sends notifications to systemd. No request passes through here.
"""
