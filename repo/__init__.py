"""Model repositories: configurations, the rules that they must keep, and the files of models."""
