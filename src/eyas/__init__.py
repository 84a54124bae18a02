"""Eyas turns a served language model into an EAGLE-3 draft model."""

__version__ = "0.1.0"
