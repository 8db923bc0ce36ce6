"""This process and its machine: kernel settings, allocator, procfs, service manager.

`process` changes settings of the calling process. `procfs` reads the CPU time and memory of processes and of the
machine. `service_manager` sends notifications to systemd. No request passes through here.
"""
