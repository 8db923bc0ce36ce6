"""This process and its machine: kernel settings, allocator, procfs, service manager, polling.

`process` changes settings of the calling process. `procfs` reads the CPU time and memory of processes and of the
machine. `service_manager` sends notifications to systemd. `polling` decides how long a process polls for input before
it sleeps. `files` replaces a file in one step.
"""
