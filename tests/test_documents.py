"""Documents: the files of a folder that are read, and the chunks that are made from them."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import tempfile
import unicodedata
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import rag
from tests.support import RagTestCase, run_rag

SETTINGS = dict.fromkeys(("API_BASE_URL", "API_KEY"), "http://127.0.0.1:9")
SETTINGS |= {"API_MODEL": "m", "API_EMBEDDING_MODEL": "e"}
FILLER = "Each word counts. " * 30  # 540 characters, so that two of them do not fit in a chunk
CODE = "For example:\n\n```sh\n" + "run it\n" * 100 + "\n# no heading\n```"
FENCED = [f"```\n{each * 600}\n```" for each in "ab"]


def texts(text: str, name: str = "a.md") -> list[str]:
    return [chunk["text"] for chunk in rag.chunks(name, text)]


def titled(text: str, name: str = "a.md") -> list[tuple[str, str]]:
    """Return [(title, text)] of the chunks of a document."""
    return [(chunk["title"], chunk["text"]) for chunk in rag.chunks(name, text)]


class TestHeadings(unittest.TestCase):
    def test_a_chunk_is_a_record_with_its_file_and_line(self) -> None:
        (chunk,) = rag.chunks("guide/a.md", "# Tower\n\nIt is high.\n")
        expected = {"id": "guide/a.md:3", "title": "Tower", "text": "It is high."}
        self.assertEqual(chunk, {**expected, "file": "guide/a.md", "line": 3})

    def test_the_title_is_every_heading_above_the_chunk(self) -> None:
        text = "# A\none\n##  B  ##\ntwo\n### C#\nthree\n## D\nfour\n# E\nfive\n"
        expected = [("A", "one"), ("A > B", "two"), ("A > B > C#", "three"), ("A > D", "four")]
        self.assertEqual(titled(text, "A.MD"), [*expected, ("E", "five")])

    def test_before_the_first_heading_the_title_is_the_name_of_the_file(self) -> None:
        expected = [("b.md", "Before."), ("Part", "After.")]
        self.assertEqual(titled("Before.\n\n## Part\n\nAfter.\n", "a/b.md"), expected)

    def test_an_underlined_heading_is_one_line_after_a_blank_one(self) -> None:
        expected = [("Tower", "High."), ("Tower > Bell 2", "Old.")]
        for before in ("", "<!-- a -->\n", "---\nid: x\n---\n", "\n"):
            text = f"{before}Tower\n=====\n\nHigh.\n\nBell 2\n--\nOld.\n"
            self.assertEqual(titled(text), expected)

    def test_lines_that_are_no_heading(self) -> None:
        for text in (
            *("#hashtag", "####### seven", "    # indented", "one\ntwo\n---", "- item\n---"),
            *("1. item\n---", "> quotation\n---", "| table |\n|---|\n| cell |", "word\n-"),
            *("Name | Size\n--- | ---\na | 1", "# " + "x" * 201),
        ):
            with self.subTest(text):
                self.assertEqual({title for title, _ in titled(f"{text}\n\nafter\n")}, {"a.md"})

    def test_plain_text_has_neither_headings_nor_comments_nor_code(self) -> None:
        text = "---\ntitle: x\n---\n# A\n<!-- b -->\n\nC\n==\n\n```\nd\n"
        self.assertEqual(titled(text, "A.TXT"), [("A.TXT", text.strip())])


class TestLeftOut(unittest.TestCase):
    def test_front_matter_is_left_out(self) -> None:
        text = '---\nid: x\ntitle: "The tower"\n---\n\nOne.\n\n# Clock\nTwo.\n'
        self.assertEqual(titled(text), [("a.md", "One."), ("Clock", "Two.")])

    def test_headings_front_matter_and_signs_alone_are_no_chunk(self) -> None:
        for text in (
            *("# A\n\n## B\n\n#\n\nC\n===\n", "---\ntitle: x\n---\n", "---\n---", "", "\n \n"),
            *("***\n\n:::\n\n| |\n|-|\n\n```\n\n```\n", "=" * 2500),
        ):
            with self.subTest(text):
                self.assertEqual(texts(text), [])

    def test_a_line_across_the_page_begins_no_front_matter(self) -> None:
        self.assertEqual(texts("---\n\nOne.\n\n---\n\nTwo.\n"), ["One.\n\n---\n\nTwo."])
        self.assertEqual(texts("---\nkey: never closed\n"), ["---\nkey: never closed"])

    def test_comments_are_left_out_where_they_begin_a_line(self) -> None:
        for text, expected in (
            (
                "<!-- YAML\nx: 1\n-->\n<!-- a --> <!-- b -->\n\nOne <!-- c --> 2.",
                "One <!-- c --> 2.",
            ),
            ("<!-- a --> text <!-- b -->\n", "text <!-- b -->"),
            ("One.\n\n<!-- never closed\n\n# Three\n\nfour\n", "One."),
            ("```html\n<!-- a\n```\n\nb\n", "```html\n<!-- a\n```\n\nb"),
        ):
            with self.subTest(text):
                self.assertEqual(texts(text), [expected])


class TestCode(unittest.TestCase):
    def test_code_stays_with_the_paragraph_before_it(self) -> None:
        for text, expected in (
            (f"{FILLER}\n\n{CODE}\n\n{FILLER}\n", [FILLER.strip(), CODE, FILLER.strip()]),
            (f"{FILLER}\n{CODE}", [f"{FILLER}\n{CODE}"]),
            ("Either:\n" + "\n".join(FENCED), [f"Either:\n{FENCED[0]}", FENCED[1]]),
        ):
            self.assertEqual(texts(text), expected)

    def test_code_that_is_too_long_is_cut_at_lines(self) -> None:
        lines = [f"    line {i:04}" for i in range(200)]
        chunks = texts("```\n" + "\n".join(lines) + "\n```\n")
        self.assertEqual("\n".join(chunks), "```\n" + "\n".join(lines) + "\n```")
        self.assertTrue(all(chunk.startswith(("```", "    line")) for chunk in chunks))
        self.assertLessEqual(max(map(len, chunks)), rag.CHUNK + 2 * rag.SHORT)

    def test_code_in_a_list_or_a_quotation_ends_at_its_fence(self) -> None:
        for before, inside in (("1. ", "   "), ("- ", "  "), ("> ", "> "), ("\t", "\t")):
            with self.subTest(before):
                code = f"{before}~~~~ js\n{inside}# one\n{inside}~~~\n{inside}~~~~\n"
                expected = [("a.md", code.rstrip()), ("A", "two")]
                self.assertEqual(titled(f"{code}\n# A\n\ntwo\n"), expected)

    def test_a_fence_is_not_opened_inside_a_line_and_holds_the_rest_if_not_closed(self) -> None:
        self.assertEqual(titled("``` a ```\n\n# B\n\nc\n"), [("a.md", "``` a ```"), ("B", "c")])
        self.assertEqual(texts("One.\n\n```\n# two\n\nthree \n\n"), ["One.\n\n```\n# two\n\nthree"])


class TestSizes(unittest.TestCase):
    def test_paragraphs_are_packed_up_to_the_limit(self) -> None:
        paragraphs = [f"{i} " + "word " * 59 + "end." for i in range(9)]
        chunks = texts("\n\n".join(paragraphs))
        self.assertEqual("\n\n".join(chunks), "\n\n".join(paragraphs))
        self.assertEqual([chunk.count("end.") for chunk in chunks], [3, 3, 3])

    def test_chunks_end_at_a_heading(self) -> None:
        self.assertEqual(texts("one\n\n# A\n\ntwo\n\n# A\n\nthree\n"), ["one", "two", "three"])

    def test_a_very_short_paragraph_joins_its_neighbour(self) -> None:
        long = "word " * 198 + "end."
        for text in (f"Note:\n\n{long}", f"{long}\n\nSee also b."):
            self.assertEqual(texts(text), [text])
        chunks = texts("\n\n".join(["a short paragraph"] * 500), "a.txt")
        self.assertLessEqual(max(map(len, chunks)), rag.CHUNK + 2 * rag.SHORT)
        self.assertGreaterEqual(min(map(len, chunks)), rag.SHORT)

    def test_a_paragraph_that_is_too_long_is_cut_where_it_hurts_least(self) -> None:
        for unit, end in (
            ("- An item. It has\n", "has"),
            ("It is one sentence here. ", "."),
            ("是一个句子。", "。"),
            ("only-words ", "s"),
        ):
            with self.subTest(unit):
                chunks = texts(unit * 300, "a.txt")
                self.assertGreater(len(chunks), 1)
                self.assertEqual({chunk[-len(end) :] for chunk in chunks}, {end})
                self.assertEqual({chunk[:2] for chunk in chunks}, {unit[:2]})
                self.assertLessEqual(max(map(len, chunks)), rag.CHUNK + 2 * rag.SHORT)

    def test_a_letter_is_not_cut_from_its_marks(self) -> None:
        for text in ("ab" + "e\u0301\u0323" * 1000, "कि" * 1500):
            chunks = texts(text, "a.txt")
            self.assertEqual("".join(chunks), text)
            self.assertFalse([each for each in chunks if unicodedata.category(each[0])[0] == "M"])

    def test_a_chunk_inside_a_line_has_its_column_in_code_points(self) -> None:
        line = "𝒳 is a word. " * 100
        first, second = rag.chunks("a.txt", f"\n{line}")
        self.assertEqual((first["id"], first["line"]), ("a.txt:2", 2))
        name, number, column = second["id"].split(":")
        self.assertEqual((name, number, second["line"]), ("a.txt", "2", 2))
        self.assertTrue(line[int(column) - 1 :].startswith(second["text"]))

    def test_a_chunk_keeps_the_indentation_of_its_first_line(self) -> None:
        for text in ("    code()", "\tcode()", "\u3000\u3000中文"):
            (chunk,) = rag.chunks("a.txt", f"\n{text}  \n\n")
            self.assertEqual((chunk["id"], chunk["text"]), ("a.txt:2", text))

    def test_line_ends_are_read_as_line_feeds(self) -> None:
        text = "# A\n\none\ntwo\n\n```\nthree\n```\n"
        for end in ("\r\n", "\r"):
            found = list(rag.chunks("a.md", text.replace("\n", end)))
            self.assertEqual(found, list(rag.chunks("a.md", text)))
        self.assertEqual(texts("one\u2028two\x85three\n"), ["one\u2028two\x85three"])

    def test_the_time_for_a_long_file_is_linear(self) -> None:
        # Each takes a second at most, and would take hours if the time were quadratic.
        size = 300_000
        for text, letters in (
            ("x" * 10_000_000, 10_000_000),
            ("x" + " " * size + "x", 2),
            ("`" * size, 0),
            ("```\n" * size, 0),
            ("<!--\n" * size, 0),
            ("short\n" * size, size * 5),
        ):
            with self.subTest(text[:5]):
                self.assertEqual(len("".join("".join(texts(text)).split())), letters)


def document(rng: random.Random) -> str:
    """Markdown in which a word's first letter tells what it is: t is for text, h for a heading."""
    numbers = iter(range(10**6))

    def words(kind: str, most: int) -> str:
        gaps = (" ", " ", "  ", "\n", ". ", "\u3000", ", ")
        some = [f"{kind}{next(numbers)}" for _ in range(rng.randint(1, most))]
        return "".join(each + rng.choice(gaps if kind == "t" else " ") for each in some).strip()

    makers: list[Any] = [
        lambda: words("t", 30),
        lambda: words("t", 400),
        lambda: words("t", 3).replace("\n", " "),
        lambda: f"{'#' * rng.randint(1, 6)} {words('h', 5)} ##",
        lambda: f"{words('h', 3)}\n{rng.choice(('====', '--'))}",
        lambda: f"<!-- {words('c', 9)} -->",
        lambda: f"<!--\n{words('c', 9)}\n\n# {words('c', 2)}\n--> {words('t', 3)}",
        lambda: f"```t{next(numbers)}\n# {words('t', 50)}\n\n<!-- {words('t', 9)}\n```",
        lambda: f"~~~\n{words('t', 500)}\n~~~",
        lambda: f"1. ```\n   {words('t', 9)}\n   ```",
        lambda: "\n".join(f"- {words('t', 9)}" for _ in range(rng.randint(1, 40))),
        lambda: "\n".join(f"| {words('t', 3)} | x |" for _ in range(rng.randint(1, 90))),
        lambda: rng.choice(("***", ":::", "\t \n", "<!-- -->", "🎉")),
        lambda: ",".join(f"t{next(numbers)}" for _ in range(rng.randint(1, 900))),
    ]
    front = rng.choice(("", "", f"---\ntitle: {words('h', 2)}\nkey: {words('f', 4)}\n---\n"))
    blocks = [rng.choice(makers)() for _ in range(rng.randint(0, 25))]
    text = front + "\n\n".join(blocks) + rng.choice(("", "\n", "\n\n  "))
    return text.replace("\n", rng.choice(("\n", "\n", "\r\n", "\r")))


class TestProperties(unittest.TestCase):
    def test_each_word_of_text_is_in_exactly_one_chunk_and_each_chunk_is_a_slice(self) -> None:
        rng = random.Random(13)
        for number in range(300):
            text = document(rng)
            for name in ("a.md", "b.txt"):
                with self.subTest(number, name=name):
                    self.check(name, text)

    def check(self, name: str, text: str) -> None:
        found = list(rag.chunks(name, text))
        normal = re.sub("\r\n?", "\n", text)
        lines = [0, *(match.end() for match in re.finditer("\n", normal))]
        for chunk in found:
            _, line, column = f"{chunk['id']}:1".split(":")[:3]
            self.assertEqual(int(line), chunk["line"])
            start = lines[int(line) - 1] + int(column) - 1
            self.assertEqual(normal[start : start + len(chunk["text"])], chunk["text"])
            self.assertEqual(chunk["text"], chunk["text"].rstrip())
            self.assertRegex(chunk["text"], r"[^\W_]")
            self.assertLessEqual(len(chunk["text"]), 2 * rag.CHUNK)
        self.assertEqual(len({chunk["id"] for chunk in found}), len(found))
        words = re.findall(r"[a-z]\d+", text)
        # A chunk that begins inside a line can continue a word.
        joined = "".join(" " * (chunk["id"].count(":") == 1) + chunk["text"] for chunk in found)
        chunked = re.findall(r"[a-z]\d+", joined)
        kept = dict.fromkeys(word for word in words if word[0] == "t" or name == "b.txt")
        self.assertEqual([word for word in chunked if word in kept], list(kept))
        self.assertEqual(len(set(chunked)), len(chunked))
        self.assertFalse([word for word in chunked if word[0] in "hf" and name == "a.md"])


class TestFiles(RagTestCase):
    def write(self, name: str, data: str | bytes = "text") -> Path:
        path = self.folder / "docs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    def read(self, path: Path | None = None) -> tuple[list[str], str]:
        """Return the ids of the chunks of a folder or file, and the lines on stderr."""
        stderr = io.StringIO()
        with contextlib.redirect_stderr(stderr):
            records = rag.read_documents(str(path or self.folder / "docs"))
        return [record["id"] for record in records], stderr.getvalue()

    def test_documents_are_taken_in_the_order_of_their_paths(self) -> None:
        for name in ("b/c.md", "b.md", "a.TXT", "z/y/x.Md", "b/a.txt"):
            self.write(name)
        expected = ["a.TXT:1", "b/a.txt:1", "b/c.md:1", "b.md:1", "z/y/x.Md:1"]
        self.assertEqual(self.read(), (expected, ""))

    def test_other_and_hidden_files_are_left_out(self) -> None:
        for name in ("a.md", "a.rst", "md", ".md", ".a.md", ".git/a.md", "b.md/c.html", "a.md.bak"):
            self.write(name)
        self.assertEqual(self.read(), (["a.md:1"], ""))

    def test_a_folder_without_a_chunk_is_an_error(self) -> None:
        (self.folder / "docs").mkdir()
        for name in (None, "a.rst", "b.md"):
            with self.subTest(name):
                if name:
                    self.write(name, "# Heading\n")
                result = run_rag("Why?", "--knowledge", str(self.folder / "docs"), environ=SETTINGS)
                self.assert_one_line(result, 2, "rag.py: knowledge: ", "docs holds no record")

    def test_a_single_document_has_its_own_name(self) -> None:
        for name in ("b/a.md", "b/.a.md"):
            expected = [f"{name[2:]}:3"]
            self.assertEqual(self.read(self.write(name, "# A\n\nb\n")), (expected, ""))

    def test_links_are_not_followed_in_a_folder(self) -> None:
        path = self.write("b/a.md")
        try:
            (path.parent / "up").symlink_to(path.parent.parent, target_is_directory=True)
            (path.parent / "c.md").symlink_to(path)
            (path.parent / "gone.md").symlink_to(self.folder / "gone")
        except OSError:
            self.skipTest("this system makes no links here")
        self.assertEqual(self.read(), (["b/a.md:1"], ""))
        self.assertEqual(self.read(path.parent / "c.md"), (["c.md:1"], ""))

    def test_names_are_composed(self) -> None:
        name = "Ü/é.md"
        for form in ("NFC", "NFD"):
            with self.subTest(form), tempfile.TemporaryDirectory() as folder:
                path = Path(folder, unicodedata.normalize(form, name))
                path.parent.mkdir()
                path.write_text("text", encoding="utf-8")
                expected = unicodedata.normalize("NFC", f"{name}:1")
                self.assertEqual(self.read(Path(folder)), ([expected], ""))
                self.assertEqual(self.read(path), ([expected.split("/")[1]], ""))

    def test_utf_8_and_utf_16_are_read(self) -> None:
        for encoding in ("utf-8", "utf-8-sig", "utf-16"):
            path = self.write("a.txt", "é𝒳".encode(encoding))
            (record,) = rag.read_documents(str(path))
            self.assertEqual(record["text"], "é𝒳")

    def test_a_warning_counts_the_files_that_cannot_be_read_and_names_the_first(self) -> None:
        self.write("a.md", "é".encode("latin-1"))
        self.write("b.md", b"\xff\xfea")
        self.write("c.md")
        ids, warning = self.read()
        self.assertEqual(ids, ["c.md:1"])
        first = "rag.py: warning: 2 not read, the first is a.md: 'utf-8' codec can't decode byte"
        self.assertTrue(warning.startswith(first), warning)
        self.assertEqual(warning.count("\n"), 1)

    def test_a_folder_that_cannot_be_opened_is_named_and_the_rest_is_read(self) -> None:
        self.write("a.md")
        self.write("b/c.md")
        scan = os.scandir

        def refuse(path: Any) -> Any:
            if Path(path).name == "b":
                raise PermissionError(13, "denied", str(path))
            return scan(path)

        with mock.patch.object(os, "scandir", refuse):
            ids, warning = self.read()
        self.assertEqual(ids, ["a.md:1"])
        self.assertRegex(warning, r"1 not read, the first is \[Errno 13\] denied: '.*docs.b'\n$")

    def test_a_document_that_does_not_exist_is_named_with_the_reason(self) -> None:
        ids, warning = self.read(self.folder / "gone.md")
        self.assertEqual(ids, [])
        self.assertIn("1 not read, the first is gone.md: [Errno 2] No such file", warning)

    def test_a_file_that_cannot_be_opened_is_named(self) -> None:
        self.write("a/b.md")
        with mock.patch.object(Path, "read_bytes", side_effect=PermissionError(13, "denied")):
            self.assertIn("1 not read, the first is a/b.md: [Errno 13] denied", self.read()[1])

    def test_a_name_that_does_not_print_is_a_warning(self) -> None:
        try:
            self.write("a\x07.md")
        except OSError:
            self.skipTest("this system refuses such names")
        self.assertIn("a\\u0007.md: its name does not print", self.read()[1])

    def test_a_question_is_answered_from_a_folder_and_explain_counts_files_and_chunks(self) -> None:
        self.write("a.md", "# Tower\n\nThe tower is 41 metres high.\n\n# Bell\n\nIt is old.\n")
        self.write("b.txt", "Entry is free.")
        result = run_rag(
            *("How high is the tower?", "--knowledge", str(self.folder / "docs"), "--explain"),
            environ=self.serve().environment(rerank=False),
        )
        self.assertIn("knowledge: records 3, files 2\n", result.stderr)
        (source,) = result.document["sources"]
        expected = {"id": "a.md:3", "title": "Tower", "file": "a.md", "line": 3}
        self.assertEqual(source, {**expected, "text": "The tower is 41 metres high."})
