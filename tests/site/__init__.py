"""The documentation site: its environment, its pages, and checks of what was built. mkdocs.yml is its configuration."""
