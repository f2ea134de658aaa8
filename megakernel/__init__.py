"""Decoding a DeepSeek-V2-Lite in one persistent kernel launch: its configuration, weights, reference and task graph."""
