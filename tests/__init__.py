"""The tests of rag.py and of its mock server: `python -m unittest` from the root."""

import importlib.util

if not importlib.util.find_spec("openai"):  # said once, and not by every test
    raise ImportError("the tests need the package openai: python -m pip install openai")
