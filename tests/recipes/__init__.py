"""Two programs that grow out of rag.py, each in one file that can be copied."""
