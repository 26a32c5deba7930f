"""How workers are started and called."""
