"""How many instances of a model exist, and when they are loaded or put to sleep."""
