"""The contract that `check` judges by. `check --help` and mock_server/README.md show the same text.

The test of the READMEs compares the two.
"""

CONTRACT = """\
A client is a command that answers one question, of its own choice, from records (id, text, maybe a
title): all records of knowledge.json, which is beside the folder mock_server, or at least 12 of its
own. It needs no input and ends within 20 seconds.

READS    API_BASE_URL, API_KEY, API_MODEL, API_EMBEDDING_MODEL, and API_RERANK_MODEL (if it is blank
         or unset, there is no rerank stage). The values change from run to run.
SENDS    JSON by POST, with the header `Authorization: Bearer KEY`, in this order. No request is
         sent twice, and no redirect is followed.
  1 BASE_URL/embeddings, one or more requests, at most 8 at the same time:
    {"model", "input": [strings]}. The question is one input. Each record is one input (records
    with equal texts share one): its text, with any text you like before and after it.
  2 BASE_URL/rerank, one request, if there is a rerank model: {"model", "query", "documents":
    [strings]}. The query is the question. The documents are the records with the highest cosine
    similarity to it. Each is a string that contains the record's text and is part of an input.
  3 BASE_URL/chat/completions, one request: {"model", "messages"}. The content of the last user
    message is the JSON text of {"question", "sources": [{"id", "title"?, "text"}]}, with no other
    keys. There are 1 to 10 sources, best first: by rerank score after a rerank, else by similarity.
ACCEPTS  Embeddings: rows of `data` in any order, bound to the inputs by `index`; a row whose index
         is absent or null has the index 0; vectors of any norm but 0.
         Rerank: a list of rows under `results`, under `data`, or as the whole body; in any order;
         as many rows as documents, or fewer; each with `index` and one number, `relevance_score` or
         `score`. A document in a row is ignored.
         Chat: white space around the JSON text of the answer. As refusal: null or an empty string.
         As tool calls: null or an empty list.
         In all replies: further fields; null as `error`; nesting to a depth of 10.
REFUSES  All other replies:
         Any status but 200. A body that is not JSON in UTF-8 (NaN, Infinity and 100,000 nested
         lists are not), or that has an `error` which is not null, also with status 200.
         Embeddings: not exactly one vector for each input; an index that is not a whole number, is
         out of range or is repeated; a vector that is not a flat list of numbers, is all zeros or
         has a norm that is not finite; vectors of different lengths, also in different replies.
         Rerank: no list of rows, or two; no score, or two, or one that is not a finite number; an
         index that is absent, not a whole number, out of range or repeated.
         Chat: not exactly one choice; a finish_reason other than "stop"; a refusal; a tool call or
         function call; a content that is not a string, or is not exactly one JSON object with the
         two keys `answer` and `source_ids`. An `answer` that is neither null nor a text that is not
         blank; `source_ids` that are not a list of strings; an id that is not equal, character for
         character, to the id of a source of this request; a repeated id; an answer without ids; a
         null answer with ids.
         Group json-library: an object with a repeated key. Many JSON libraries do not report this;
         `--without json-library` leaves these scenarios out.
         To refuse a reply means: send no further request (embedding requests that are already under
         way are allowed), print nothing on stdout, and exit with a status other than 0.
PRINTS   One JSON document in UTF-8 on stdout, with exit status 0: {"answer": the model's answer,
         "sources": [{"id": ...}, ...]}. The sources are the cited records, in the order cited.
         Further keys are allowed; `text` in a source must be the record's text.
         {"answer": null, "sources": []} is an abstention. It is printed if the answer is null, or,
         without a chat request, if the reranker returned no row. A client with a similarity
         threshold also abstains if no record reaches it.
         The key is printed on neither stream.
QUOTES   Optional. If RAG_QUOTES is 1, a client may ask for quotes: then a system message or the
         response_format contains the word `citations`, and the model writes one object with exactly
         the keys `citations`, a list of {"source_id", "quote"}, and `answer`. Refused, too: a quote
         that is not one piece of whole words of its source's text (different white space, quotation
         marks, dashes and composed accents are accepted); a quote of fewer than 3 words that is not
         the whole text; the same quote twice. The document also has "quotes": [{"id", "start",
         "end", "text"}], one for each citation: text is the record's text from start to end, in
         code points. The sources are in the order first cited.

Not judged: the wording of messages and prompts; stderr; batch sizes; the number of candidates and
sources; the optional fields that the mock knows (encoding_format; top_n, up to the number of
documents; return_documents; temperature and other options of the chat); the Content-Type and
Content-Encoding of a reply; long and slow replies; what some languages cannot tell apart (an index
of 1.0, half of a surrogate pair); a valid citation of a source that contains instructions; a quote
that differs in case, in Markdown marks, in characters that are not drawn, in ligatures, in the form
of an ellipsis or a sentence mark, or in sentence marks at its ends."""
