"""This process and its machine: allocator, kernel settings, procfs, service manager."""
