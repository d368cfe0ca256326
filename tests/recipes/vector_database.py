"""Answer questions from records in a vector database: the pipeline of rag.py on Chroma.

When to use it: with many records, or with several users. A question reads no file: the records and
their vectors are in Chroma, which runs as a service of its own.

    pip install openai chromadb==1.5.9
    chroma run --path vectors --host 127.0.0.1 --port 8000    # CHROMA_URL is its address
    python -m tests.recipes.vector_database --build "When is the library open on Saturday?"

The settings are rag.py's. --build stores the records of RAG_KNOWLEDGE and removes all others.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import chromadb
from chromadb.config import Settings

import rag


def open_table(url: str, settings: rag.Settings) -> Any:
    """Return the collection of the embedding model, empty if it is new. Raise RagError."""
    with rag.located(f"database: {url}", " (set CHROMA_URL, or run `chroma run --path vectors`)"):
        client = chromadb.HttpClient(url, settings=Settings(anonymized_telemetry=False))
        # The key differs with all that shapes a vector: server, model, options and prefix.
        name = f"rag-{rag.cache_key(settings.API_DOCUMENT_PREFIX, settings).hex()[:40]}"
        cosine: Any = {"hnsw": {"space": "cosine"}}
        # embedding_function=None, because the default one downloads a model.
        return client.get_or_create_collection(name, None, cosine, {"records": 0}, None)


def row(record: rag.Record) -> tuple[str, dict[str, Any]]:
    """Return a record as JSON, and its metadata: a digest, and each FIELD=VALUE for --where."""
    document, meets = json.dumps(record, ensure_ascii=False), []
    for name in record.keys() - {"text"}:  # which would be stored twice, and indexed as a whole
        values = [record[name], *(record[name] if isinstance(record[name], list) else [])]
        meets += [f"{name}={one if isinstance(one, str) else json.dumps(one)}" for one in values]
    # A list, not a key for each field: upsert keeps a key that the new metadata does not have.
    return document, {"digest": hashlib.sha256(document.encode()).hexdigest(), "meets": meets}


def build(records: rag.Records, table: Any, run: rag.Run) -> None:
    """Make the collection hold exactly these records. Only new and edited ones are embedded."""
    wanted = {record["id"]: row(record)[1]["digest"] for record in records}
    with rag.located("database"):
        rows = table.get(include=["metadatas"])
        held = {name: each["digest"] for name, each in zip(rows["ids"], rows["metadatas"])}
        # Edited ones too: a search refuses a collection with too few records, but not old ones.
        if gone := [name for name in held if held[name] != wanted.get(name)]:
            table.delete(gone)
        table.modify(metadata={"records": len(records)})  # a search compares it with the count
    new = [record for record in records if held.get(record["id"]) != wanted[record["id"]]]
    run.explain(f"database: {len(new)} records to embed, {len(gone)} removed")
    # One embedding request alone, then as many as run at a time. Chroma takes up to 5,461 rows.
    size = min(5000, run.settings.API_EMBEDDING_BATCH * (1 + run.settings.API_EMBEDDING_PARALLEL))
    for group in [new[i : i + size] for i in range(0, len(new), size)]:
        with rag.located("embeddings"):
            vectors = [vector.tolist() for vector in rag.embed([], group, run)]
        with rag.located("database"):
            documents, metadatas = zip(*map(row, group))
            table.upsert([each["id"] for each in group], vectors, [*metadatas], [*documents])


def search(question: str, where: Sequence[str], table: Any, run: rag.Run) -> rag.Ranking:
    """Return the nearest records that meet all conditions: best first, equally similar by id."""
    with rag.located("database"):
        held, records = table.count(), table.metadata["records"]
        rag.require(held == records > 0, f"{held} of {records} records are stored; use --build")
    with rag.located("embeddings"):
        [target] = rag.embed([question], [], run)
    count = min(held, max(run.settings.RAG_CANDIDATES, run.settings.RAG_SOURCES))
    conditions = [{"meets": {"$contains": each}} for each in where]
    with rag.located("database"):
        joined = {"$and": conditions * 2} if where else None  # Chroma refuses $and with one
        reply = table.query([target.tolist()], n_results=count, where=joined)
        columns = (reply[name][0] for name in ("ids", "documents", "distances"))
        nearest = [check_row(*each) for each in zip(*columns, strict=True)]
        met = {record["id"] for record in rag.matching([each[0] for each in nearest], where)}
        right = len(met) == len(nearest) <= count and (where or len(met) == count)
        rag.require(right, f"{len(nearest)} rows for {count}, {len(met)} records that meet --where")
    return sorted(nearest, key=lambda each: (-round(each[1], 6), each[0]["id"]))


def check_row(name: str, document: str, distance: float) -> tuple[rag.Record, float]:
    """Return the record of a row and its similarity. Raise RagError."""
    record = rag.strict_json(document, f"row {name}")
    rag.check_record(record)
    rag.require(record["id"] == name, f"row {name} holds the record {record['id']}")
    rag.require(-0.001 <= distance <= 2.001, f"row {name} has the distance {distance}")
    return record, max(-1.0, min(1.0, 1 - distance))


def document() -> str:
    """Return the text for stdout. Raise RagError with the stage that failed."""
    parser = rag.arguments()
    parser.add_argument("--build", action="store_true", help="store the records first")
    with rag.located("usage"):
        options = parser.parse_args()
        rag.require((options.question or "").strip(), "ask a question")
    with rag.located("settings"):
        settings = rag.read_settings(os.environ)
        url = os.environ.get("CHROMA_URL", "http://127.0.0.1:8000")
        rag.read_setting("CHROMA_URL", rag.URL, url)
    with rag.open_run(settings, options.explain) as run:
        table = open_table(url, settings)
        if options.build:
            with rag.located("knowledge"):
                records = rag.read_knowledge(options.knowledge or settings.RAG_KNOWLEDGE)
            build(records, table, run)
        nearest = search(options.question, options.where, table, run)
        return json.dumps(rag.answer_from(nearest, options.question, run), ensure_ascii=False)


if __name__ == "__main__":
    sys.exit(rag.run_command("vector_database.py", document))
