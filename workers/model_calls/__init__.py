"""What a model sends by itself: calls of other models, responses at any time, and its counters."""
