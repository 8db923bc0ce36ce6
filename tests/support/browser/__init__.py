"""A real browser, driven by its own protocol: `chromium` starts it, `tab` is one page in it."""
