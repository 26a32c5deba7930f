"""The supported model architectures."""
