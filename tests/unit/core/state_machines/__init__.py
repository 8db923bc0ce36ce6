"""State machines of Hypothesis: the core under all that clients, workers, links and time can do to it."""
