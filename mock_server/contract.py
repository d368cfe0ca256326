"""The contract that `python -m mock_server check` judges. README.md shows the same text."""

CONTRACT = """\
A client answers one question, of its own choice, from records (id, text, maybe a title): all those
of knowledge.json, beside the folder mock_server, or 12 and more of its own. It is a command that
needs no input and ends within 20 seconds.

READS    API_BASE_URL, API_KEY, API_MODEL, API_EMBEDDING_MODEL and API_RERANK_MODEL (blank: no
         rerank).
SENDS    JSON by POST with the header `Authorization: Bearer KEY`, in this order. Nothing is sent
         twice, no redirect is followed.
  1 BASE_URL/embeddings, one or more times, at most 8 at a time: {"model", "input": [strings]}.
    The question is an input once, and so is every record (equal texts together once): its text,
    and what you like before or behind it.
  2 BASE_URL/rerank, once, if there is a rerank model: {"model", "query", "documents": [strings]}.
    The query is the question. The documents are the records nearest to it by cosine similarity,
    each a string that holds the record's text and is part of an embedded input.
  3 BASE_URL/chat/completions, once: {"model", "messages"}. The last user message is the JSON of
    {"question", "sources": [{"id", "title"?, "text"}]}, with no other keys. There are 1 to 10
    sources, the best ones, best first: by rerank score after a rerank, else by similarity.
ACCEPTS  Embeddings: rows of `data` in any order, bound to the inputs by `index` (one row of a reply
         may have none, or null: it is 0); vectors of any norm but 0. Rerank: rows in `results`,
         in `data` or as a bare list, in any order, as many as the documents or fewer, each with
         one finite `relevance_score` or `score`; a document in a row is ignored. Chat: white space
         around the JSON text of the answer; null, or an empty list, for refusal and tool calls.
REFUSES  Everything else. Any status but 200; what is not JSON, or has a repeated key. An index
         that is no whole number, is out of range, repeated or (but for that 0) missing; not one
         vector for each input; vectors of all requests that differ in how many numbers they have;
         one that is all zeros, or has a norm that is not finite; a score that is no number; two
         lists of rows, two scores. Not exactly one choice; a finish_reason other than "stop"; a
         refusal; a tool call; content that is not a string. Text that is not one JSON object with
         exactly `answer` (text that is not blank, or null) and `source_ids` (a list). An id that
         is not, character for character, one that was sent in this request; an id twice; an
         answer without ids; null with ids.
         To refuse is to end: no further request (but embedding requests that are on their way),
         nothing on stdout, an exit status that is not 0.
PRINTS   One JSON document on stdout, in UTF-8, exit status 0: {"answer": what the model answered,
         "sources": [{"id": ...}, ...]}, the records that it cited, in the order cited. Other keys
         are free; a `text` in a source is that of the record. {"answer": null, "sources": []} if
         the answer is null, or if the reranker returned no row: then the chat is not asked. (Also
         if no record is near the question, for a client with a threshold.) The key is on neither
         stream.
QUOTES   With RAG_QUOTES=1, if you like: an instruction or the response_format names `citations`.
         The answer is then one object with exactly `citations`, a list of objects with `source_id`
         and `quote`, and `answer`. Refused is also a quote that does not stand in the text of its
         source in one piece of whole words, but for white space, straight or curly marks, kinds of
         dash and composed accents; one of less than 3 words that is not all of the text; the same
         twice. Printed is also "quotes": [{"id", "start", "end", "text"}], where text is the
         record's from start to end, counted in code points; sources in the order first cited.

Not judged: words, the prompt, stderr, batches, how many candidates and sources, optional fields
that the mock knows (encoding_format; top_n, up to the number of documents; return_documents;
temperature and the like), the content type and encoding of a reply, one that is long or slow, what
some languages cannot see (an index of 1.0, half of a surrogate pair), a true citation of a source
that gave the model orders."""
