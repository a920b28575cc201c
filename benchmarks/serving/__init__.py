"""A real server, a client that records everything it answers, and upstream's own benchmark against it."""
