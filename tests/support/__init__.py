"""What tests share, by subject."""
