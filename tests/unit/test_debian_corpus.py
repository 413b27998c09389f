"""config/corpora/debian/prepare.py: how manuals, pages and code become documents."""

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "config/corpora/debian/prepare.py"
_spec = importlib.util.spec_from_file_location("prepare", SCRIPT)
assert _spec is not None and _spec.loader is not None
prepare = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prepare)

LINES = st.lists(
    st.sampled_from(["Title", "=====", "", "  text", "== Part", "=head1 NAME", "def f():", "}"])
)


@given(lines=LINES)
@pytest.mark.parametrize("split", ["split_headings", "split_pod", "split_definitions"])
def test_sections_end_to_end_are_the_text(split, lines):
    text = "\n".join(lines)
    assert "".join(getattr(prepare, split)(text)) == text


@given(sizes=st.lists(st.integers(0, 900)))
def test_joined_documents_are_long_enough_and_lose_at_most_a_short_end(sizes):
    sections = ["x" * size for size in sizes]
    documents = list(prepare.join_sections(iter(sections)))
    assert all(len(document) >= prepare.LEAST_CHARACTERS for document in documents[:-1])
    assert 0 <= sum(sizes) - sum(map(len, documents)) < prepare.LEAST_CHARACTERS // 4


def test_a_manual_page_loses_its_fonts_and_keeps_its_words():
    page = '.\\" a comment\n.SH NAME\nls \\- list \\fBfiles\\fP\n.SH OPTIONS\n.B \\-a\n'
    assert list(prepare.split_manual(page)) == ["", "NAME\nls - list files", "OPTIONS\n-a"]


def test_a_page_gives_the_visible_text_of_each_heading():
    page = "<head><title>T</title></head><h1>A</h1><p>one</p><script>x()</script><h2>B</h2>two"
    assert [text.strip() for text in prepare.split_page(page)] == ["", "A\n\none", "B\ntwo"]
