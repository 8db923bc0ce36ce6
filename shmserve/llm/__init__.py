"""What gateways and engines know of language models."""
