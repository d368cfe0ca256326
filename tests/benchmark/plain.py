"""Do the job of rag.py without any check, as a first version would: the benchmark's comparison.

    python tests/benchmark/plain.py "When is the library open on Saturday?"

It reads API_BASE_URL, API_KEY, API_MODEL, API_EMBEDDING_MODEL and RAG_KNOWLEDGE. It must not be
made faster, or the ratios would change.
"""

from __future__ import annotations

import json
import os
import sys
from math import sqrt

from openai import DefaultHttpxClient, OpenAI

PROMPT = (
    "Answer the question from the sources. Reply with a JSON object that has the keys "
    '"answer" and "source_ids".'
)


def cosine(a: list[float], b: list[float]) -> float:
    product = sum(x * y for x, y in zip(a, b))
    return product / (sqrt(sum(x * x for x in a)) * sqrt(sum(y * y for y in b)))


def main() -> None:
    question = sys.argv[1]
    with open(os.environ["RAG_KNOWLEDGE"], encoding="utf-8") as file:
        records = json.load(file)
    client = OpenAI(
        base_url=os.environ["API_BASE_URL"],
        api_key=os.environ["API_KEY"],
        http_client=DefaultHttpxClient(),  # old SDKs fail with a new httpx without it
    )

    texts = [record.get("title", "") + "\n" + record["text"] for record in records]
    reply = client.embeddings.create(
        model=os.environ["API_EMBEDDING_MODEL"], input=[question, *texts], encoding_format="float"
    )
    asked, *vectors = [row.embedding for row in reply.data]

    similarities = [cosine(asked, vector) for vector in vectors]
    best = sorted(range(len(records)), key=lambda i: similarities[i], reverse=True)[:3]
    names = ("id", "title", "text")
    sources = [{name: records[i].get(name, "") for name in names} for i in best]

    completion = client.chat.completions.create(
        model=os.environ["API_MODEL"],
        messages=[
            {"role": "system", "content": PROMPT},
            {"role": "user", "content": json.dumps({"question": question, "sources": sources})},
        ],
    )
    answer = json.loads(completion.choices[0].message.content or "")
    cited = [record for record in records if record["id"] in answer["source_ids"]]
    print(json.dumps({"answer": answer["answer"], "sources": cited}))


if __name__ == "__main__":
    main()
