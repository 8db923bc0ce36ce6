"""The listener in a thread, connected to a fake broker."""
