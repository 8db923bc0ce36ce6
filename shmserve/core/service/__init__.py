"""The parts of a `Service`: how requests are checked, queued, batched and spread. Each is pure and knows no records."""
