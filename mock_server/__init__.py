"""A local mock of an OpenAI-compatible service. Each fault that it can serve has its own address.

It needs the standard library only, listens on 127.0.0.1 only, and is deterministic. It contains no
model, so its answers say nothing about the quality of answers.
"""
