"""The listener in a thread, before a fake broker."""
