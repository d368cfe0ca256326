"""Measure retrieval, thresholds and citations on labelled questions: `python -m tests.evaluate`.

Everything is sent with the functions of rag.py, to the service that the API_* variables name.

    questions.py   the file of labelled questions
    measures.py    keyword search, rank fusion, places and intervals, as functions of plain data
    retrieval.py   the records that each search finds for a question, and the threshold
    answers.py     the chat model's answer to each question, and how it is judged
    report.py      the figures, as one JSON document and as text
"""
