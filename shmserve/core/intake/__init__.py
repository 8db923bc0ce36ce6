"""The one way in: from messages of clients, models and ensembles to queued requests."""
