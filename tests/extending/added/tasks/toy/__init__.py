"""The toy benchmark."""
