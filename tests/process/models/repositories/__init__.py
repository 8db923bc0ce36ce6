"""Where models come from: object stores, mirrors and repository agents."""
