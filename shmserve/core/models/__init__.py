"""Model versions and their worker processes: deployed, loaded, restarted, retired."""
