"""Files that a configuration names beside the model: labels, warm-up data, initial states."""
