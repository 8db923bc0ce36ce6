"""The worker's process: device, interpreter, log and exit codes."""
