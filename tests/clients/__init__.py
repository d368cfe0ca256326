"""Clients of the mock server: two that keep the contract, and many with one fault each."""
