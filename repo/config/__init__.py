"""config.pbtxt read into frozen values, with the place of each mistake."""
