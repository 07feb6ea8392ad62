"""Put saved models to use: over HTTP, as exports for other programs, and in spaCy."""
