"""Untrusted native work (video decoding, mesh loading, rendering) in child processes."""
