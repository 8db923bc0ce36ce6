"""The documentation site: its environment, its pages, and checks of the built site. mkdocs.yml is its configuration."""
