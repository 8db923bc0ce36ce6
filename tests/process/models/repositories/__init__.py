"""Sources of models: object stores, mirrors and repository agents."""
