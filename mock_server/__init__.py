"""A local mock of an OpenAI-compatible service, in which a fault is an address.

Standard library only, loopback only, deterministic. No model: its answers say nothing of quality.
"""
