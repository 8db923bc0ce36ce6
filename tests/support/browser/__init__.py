"""A real browser, controlled by its own protocol: `chromium` starts it, `tab` is one page in it."""
