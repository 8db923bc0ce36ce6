"""Code that tests share, by subject."""
