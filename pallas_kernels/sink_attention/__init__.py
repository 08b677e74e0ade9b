"""Decode attention with sinks over the two kinds of KV cache."""
