"""This process and its machine: kernel settings, allocator, procfs, service manager, polling.

`process` changes settings of the calling process, and `interrupts` how it handles Ctrl-C. `procfs` reads the CPU time
and memory of processes and of the machine. `service_manager` sends notifications to systemd. `polling` decides how long
a process polls for input before it sleeps. `files` replaces a file in one step. `server_process` starts a server and
waits until it is ready.
"""
