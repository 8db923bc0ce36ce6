"""The settings of `shmserve serve`: flags, environment and configuration file."""
