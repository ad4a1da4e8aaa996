"""kvtier keeps the KV cache of an LLM engine alive beyond the accelerator's memory."""

__version__ = "0.1.0"
