"""Real English text without repeats, from what is installed on a machine, for measuring tokenizers.

A text that repeats flatters an engine that caches what it has seen, and made-up words flatter none as real ones do.
Manual pages, package documentation and the docstrings of the Python environment are real, and lie on most machines:
technical English, denser in symbols than the web's. Paragraphs that repeat are dropped, long documents are cut at
paragraphs to log-normal lengths. Files come in an order drawn by a seed, until there is enough: any amount is a mixture
of the machine's sources, and the same machine gives the same text again.
"""

import functools
import gzip
import hashlib
import html
import os
import random
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenscale.base.errors import UserError
from tokenscale.base.files import atomic
from tokenscale.base.progress import Progress
from tokenscale.cli.main import Parser, exit_code
from tokenscale.data.corpus import docstrings
from tokenscale.settings.data import SourceSettings

#: paragraphs of so many characters are taken once: shorter ones repeat in any text ("See also", "Parameters")
REPEAT_CHARACTERS = 200
#: a shorter document is none
MINIMUM_CHARACTERS = 200
#: lengths that documents are cut to, in characters: log-normal with this median and standard deviation of the logarithm
MEDIAN_CHARACTERS, SIGMA = 2500, 1.0
ROW_GROUP_ROWS = 1000
#: of a hundred words of English prose, 40 are among these; lists, tables, licences' names and other languages have few
COMMON_WORDS = frozenset("the of to and a in is that for it as be with on this are or by not if from an can".split())
COMMON_SHARE = 0.15
#: endings of files that hold text, and those that are read as web pages
TEXT_ENDINGS = (".md", ".rst", ".txt", ".text", ".html", ".htm", ".pod", ".info")
WEB_ENDINGS = (".html", ".htm")
#: files without an ending that hold text
TEXT_NAMES = re.compile(r"(readme|news|faq|todo|hacking|howto|install|manual|notes)([._-](debian|[\d.]+))*")


@dataclass(frozen=True)
class Roots:
    """Where to look: folders with man1 … man9, folders of documentation, and folders of Python packages."""

    manual: tuple[Path, ...] = (Path("/usr/share/man"), Path("/usr/local/share/man"))
    documentation: tuple[Path, ...] = (
        *(Path("/usr/share/doc"), Path("/usr/share/info"), Path("/usr/share/perl"), Path("/usr/share/javadoc")),
        *(Path("/usr/lib/python3/dist-packages"), Path("/usr/local/share/doc")),
    )
    environment: tuple[Path, ...] = (Path(sysconfig.get_path("purelib")),)
    packages: tuple[str, ...] = ("stdlib", "pydoc_data")


def build(
    output: Path, megabytes: float, roots: Roots | None = None, seed: int = 0, at_most: bool = False
) -> dict[str, Any]:
    """Write so many megabytes (10**6 bytes of UTF-8) of text to a Parquet file: columns `text` and `origin`.

    Returns documents, bytes, and both of each source. Raises UserError where the machine holds less, unless `at_most`.
    """
    roots = roots or Roots()
    requested = round(megabytes * 1e6)
    progress = Progress("text", total_bytes=requested)
    taken: list[tuple[str, str]] = []
    found = 0
    for text, origin in documents(roots, seed):
        if found >= requested:
            break
        size = len(text.encode())
        found += size
        taken.append((text, origin))
        progress(1, size)
    progress.close()
    if found < requested and not at_most or not taken:
        raise UserError(
            f"this machine holds less real text than {megabytes:g} MB.",
            found=f"{found / 1e6:.1f} MB in {len(taken):,} documents, repeats left out",
            looked=", ".join(str(p) for p in roots.manual + roots.documentation + roots.environment),
            next="ask for less, or add --at-most to take what is there" if taken else None,
        )
    taken.sort(key=lambda document: _key(seed, document[1]))
    with atomic(output) as temporary:
        table = pa.table({"text": [text for text, _ in taken], "origin": [origin for _, origin in taken]})
        pq.write_table(table, temporary, compression="zstd", compression_level=3, row_group_size=ROW_GROUP_ROWS)
    counts, sizes = Counter(), Counter()
    for text, origin in taken:
        counts[source := origin.split("/")[0]] += 1
        sizes[source] += len(text.encode())
    return {
        "documents": len(taken),
        "bytes": found,
        "sources": {s: {"documents": counts[s], "bytes": sizes[s]} for s, _ in sizes.most_common()},
        "file": str(output),
        "file_bytes": output.stat().st_size,
    }


def table(facts: dict[str, Any]) -> str:
    """The facts for a terminal."""
    lines = [f"{'source':<16} {'documents':>10} {'MB':>8} {'share':>7}"]
    for source, of in facts["sources"].items():
        lines.append(
            f"{source:<16} {of['documents']:>10,} {of['bytes'] / 1e6:>8.1f} {of['bytes'] / facts['bytes']:>7.1%}"
        )
    lines.append(f"{'all':<16} {facts['documents']:>10,} {facts['bytes'] / 1e6:>8.1f}")
    lines.append(f"{facts['file']}  {facts['file_bytes']:,} bytes")
    return "\n".join(lines)


def documents(roots: Roots, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(text, origin) of every document of these folders: English, none twice, in the order of the seed.

    The origin begins with the source: `manual/man1/ls.1.gz::0` is the first piece of a manual page.
    """
    seen, seen_whole = set(), set()
    for origin, read in sorted(_files(roots), key=lambda file: _key(seed, file[0])):
        for name, text in read():
            kept = [p for p in paragraphs(text) if _new(p, seen)]
            draw = random.Random(f"{seed}/{origin}{name}")
            pieces = cut(kept, lambda draw=draw: MEDIAN_CHARACTERS * draw.lognormvariate(0, SIGMA))
            for number, piece in enumerate(pieces):
                if len(piece) >= MINIMUM_CHARACTERS and is_english(piece) and _new(piece, seen_whole):
                    yield piece, f"{origin}{name}::{number}"


def paragraphs(text: str) -> list[str]:
    """What empty lines divide, without white space at the ends of lines.

    >>> paragraphs("One.  \\nStill one.\\n\\n\\nTwo.\\n")
    ['One.\\nStill one.', 'Two.']
    """
    lines = "\n".join(line.rstrip() for line in text.expandtabs().splitlines())
    return [p.strip("\n") for p in re.split(r"\n{2,}", lines) if p.strip()]


def cut(paragraphs: list[str], length: Callable[[], float]) -> Iterator[str]:
    """Paragraphs in pieces: each ends with the paragraph that reaches its drawn length in characters.

    >>> list(cut(["aa", "bb", "cc", "dd"], lambda: 5))
    ['aa\\n\\nbb', 'cc\\n\\ndd']
    """
    piece: list[str] = []
    size, target = 0, length()
    for paragraph in paragraphs:
        piece.append(paragraph)
        size += len(paragraph) + 2
        if size >= target:
            yield "\n\n".join(piece)
            piece, size, target = [], 0, length()
    if piece:
        yield "\n\n".join(piece)


def is_english(text: str) -> bool:
    """Whether its words are those of English sentences.

    >>> is_english("The size of a file is in bytes."), is_english("Die Größe einer Datei wird in Bytes angegeben.")
    (True, False)
    """
    words = re.findall(r"[^\W\d_]+", text.lower())
    return sum(word in COMMON_WORDS for word in words) >= COMMON_SHARE * max(1, len(words))


# -- markup


def plain_web(page: str) -> str:
    """The text of a web page: tags removed, blocks as paragraphs.

    >>> plain_web("<p>One <b>bold</b> word &amp; more.<p>Two.<script>x()</script>").split("\\n\\n")
    ['', 'One bold word & more.', 'Two.']
    """
    page = re.sub(r"(?is)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", "", page)
    page = re.sub(r"(?i)</?(p|div|h\d|ul|ol|li|dl|dt|dd|table|tr|pre|section|blockquote)\b[^>]*>", "\n\n", page)
    page = re.sub(r"(?i)<br\b[^>]*>", "\n", page)
    return re.sub(r"\n{3,}", "\n\n", html.unescape(re.sub(r"<[^>]*>", "", page)))


#: names of roff's special characters; any other is left out
_CHARACTERS = {
    **{"aq": "'", "dq": '"', "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "em": "—", "en": "–", "hy": "-", "mi": "-"},
    **{"bu": "•", "co": "©", "rg": "®", "tm": "™", "ha": "^", "ti": "~", "rs": "\\", "ga": "`", "mu": "×", "de": "°"},
    **{"<=": "≤", ">=": "≥", "->": "→", "<-": "←", "+-": "±", "ci": "○", "ba": "|", "sh": "#", "at": "@", "sq": "□"},
}
#: strings that pod2man defines
_STRINGS = {"--": "—", 'L"': '"', 'R"': '"', "C`": "", "C'": "", "Aq": "'", "lq": '"', "rq": '"', "R": "®", "Tm": "™"}
_ESCAPE = re.compile(
    r"\\(?:"
    r"f(?:\[[^\]]*\]|\(..|.)"  # fonts
    r"|s(?:[+-]?\d+|\[[^\]]*\])|[mMFgk](?:\[[^\]]*\]|\(..|.)"  # sizes, colours, families
    r"|[hvwlLDXZbo]'[^']*'|n[+-]?(?:\[[^\]]*\]|\(..|.)"  # movements, registers
    r"|\((?P<pair>..)|\[(?P<long>[^\]]*)\]"  # characters
    r"|\*(?:\[(?P<name>[^\]]*)\]|\((?P<two>..)|(?P<one>.))"  # strings
    r"|(?P<other>.))"
)
_OTHER = {"-": "-", "e": "\\", "\\": "\\", "~": " ", " ": " ", "0": " ", "'": "'", "`": "`", ".": ".", "t": " "}
#: requests that begin a paragraph, and those whose arguments are a heading, or text
_BREAKS = frozenset("PP P LP IP TP HP TQ sp RS RE br Pp It Bl El Bd Ed in ti ce SY YS nf fi EX EE Vb Ve".split())
#: requests whose lines stand as they are written, and those that end this
_AS_WRITTEN = {"nf": False, "EX": False, "Vb": False, "fi": True, "EE": True, "Ve": True}
#: requests of large letters whose arguments are no text; those of other large letters are fonts that pages define
_SETTINGS = frozenset("TH IX PD TA UE ME DS DE RS".split())
_HEADINGS = frozenset("SH SS Sh Ss".split())
_FONTS = frozenset("B I R SM SB BI BR IB IR RB RI".split())
#: mdoc: macros that may stand among a line's words
_MDOC = frozenset(
    "Ad An Ao Ac Ap Aq Ar Bc Bo Bq Brq Bsx Bx Cd Cm Dc Do Dq Dv Dx Ec Em Eo Er Ev Fa Fc Fl Fn Fo Fr Ft Fx Ic In Lb Li "
    "Lk Ms Mt Nd Nm No Ns Nx Oc Oo Op Ot Ox Pa Pc Pf Po Pq Qc Ql Qo Qq Sc So Sq Sx Sy Tn Ux Va Vt Xc Xo Xr".split()
)
#: what lies between these is dropped: definitions, comments, tables, equations, pictures
_BLOCKS = {"de": ".", "ig": ".", "am": ".", "TS": "TE", "EQ": "EN", "PS": "PE"}


def plain_roff(page: str) -> str:
    """The text of a manual page (man, mdoc or pod2man's): requests and escapes removed, lines of a paragraph joined.

    >>> plain_roff('.TH LS 1\\n.SH NAME\\nls \\\\- list\\n.B directory\\ncontents\\n.PP\\nSee \\\\fIdu\\\\fP(1).')
    'NAME\\n\\nls - list directory contents\\n\\nSee du(1).'
    """
    done: list[str] = []
    words: list[str] = []  # of the paragraph at hand
    until, depth, fill = None, 0, True

    def end(heading: str = "") -> None:
        if words:
            done.append((" " if fill else "\n").join(words))
            words.clear()
        if heading:
            done.append(heading)

    for line in page.splitlines():
        request, _, rest = line[1:].lstrip().partition(" ") if line[:1] in (".", "'") else ("", "", line)
        if until is not None:
            until = None if request == until else until
        elif depth or (request in ("if", "ie", "el", "while") and r"\{" in line):
            depth += line.count(r"\{") - line.count(r"\}")  # conditions set up fonts and indices, they hold no text
        elif not request:
            if text := _unescaped(line).strip() if fill else _unescaped(line).rstrip():
                words.append(text)
            elif line[:1] not in (".", "'"):
                end()
        elif request in _BLOCKS:
            end()
            until = _BLOCKS[request]
        elif request in _HEADINGS:
            end(" ".join(_arguments(rest)))
        elif request in _BREAKS:
            end()
            fill = _AS_WRITTEN.get(request, fill)
            if request == "IP" or request == "It":
                words.extend(_mdoc(_arguments(rest)[:1] if request == "IP" else _arguments(rest)))
        elif request in _FONTS and rest:
            words.append(("" if len(request) == 2 and request[0] != "S" else " ").join(_arguments(rest)))
        elif request in _MDOC:
            words.extend(_mdoc([request, *_arguments(rest)]))
        elif request.isupper() and request not in _SETTINGS:
            words.extend(_arguments(rest))
    end()
    return "\n\n".join(text for text in done if text.strip())


def _arguments(text: str) -> list[str]:
    """Arguments of a request: words, or what stands in double quotes."""
    found = re.findall(r'"((?:[^"]|"")*)"?|(\S+)', re.sub(r'\\".*', "", text))
    return [_unescaped(quoted or word) for quoted, word in found]


def _mdoc(words: list[str]) -> list[str]:
    """Words of an mdoc line: macros left out, a flag with its dash, punctuation at the word before."""
    line = ""
    dash = False
    for word in words:
        if word in _MDOC:
            dash = word == "Fl"
            continue
        line += ("" if not line or re.fullmatch(r"[.,;:!?)\]]", word) else " ") + ("-" if dash else "") + word
        dash = False
    return [line] if line else []


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(_character, re.sub(r'\\["#].*', "", text))


def _character(match: re.Match) -> str:
    if (name := match["pair"] or match["long"]) is not None:
        return _CHARACTERS.get(name, "")
    if (name := match["name"] or match["two"] or match["one"]) is not None:
        return _STRINGS.get(name, "")
    return _OTHER.get(match["other"] or "", "")


# -- files


def _files(roots: Roots) -> Iterator[tuple[str, Callable[[], Iterator[tuple[str, str]]]]]:
    """(origin, what reads it) of every file and every package. A reader yields (name inside, plain text)."""
    for root in roots.manual:
        for section in sorted(root.glob("man[0-9]*")):
            for path in _walk(section):
                yield f"manual/{section.name}/{path.relative_to(section)}", _reader(path, plain_roff)
    for source, folders in (("documentation", roots.documentation), ("environment", roots.environment)):
        for root in folders:
            for path in _walk(root):
                name = path.name.lower().removesuffix(".gz")
                if name.endswith(TEXT_ENDINGS) or TEXT_NAMES.fullmatch(name):
                    plain = plain_web if name.endswith(WEB_ENDINGS) else str
                    yield f"{source}/{root.name}/{path.relative_to(root)}", _reader(path, plain)
    installed = {path.parent.name for root in roots.environment for path in root.glob("*/__init__.py")}
    for package in sorted(installed.union(roots.packages)):
        yield f"docstrings/{package}", lambda package=package: _docstrings(package)


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders.sort()
        yield from (path for name in sorted(names) if not (path := Path(folder, name)).is_symlink())


def _reader(path: Path, plain: Callable[[str], str]) -> Callable[[], Iterator[tuple[str, str]]]:
    def read() -> Iterator[tuple[str, str]]:
        try:
            content = path.read_bytes()
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError):
            return  # not for us to read, or not UTF-8
        yield "", plain(text)

    return read


def _docstrings(package: str) -> Iterator[tuple[str, str]]:
    """The docstrings of each file of a package as one document: single ones are often a line."""
    source = SourceSettings(kind="docstrings", packages=(package,))
    for file, found in groupby(docstrings.documents(source), key=lambda document: document[1].partition("::")[0]):
        yield f"/{file.removeprefix(f'{package}/')}", "\n\n".join(text for text, _ in found)


def _new(text: str, seen: set[bytes]) -> bool:
    """Whether no text of the same letters was seen; a short one is new always. Markup and numbers do not count."""
    if len(text) < REPEAT_CHARACTERS:
        return True
    digest = hashlib.blake2b(re.sub(r"[\W\d_]+", "", text.lower()).encode(), digest_size=12).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True


def _key(seed: int, origin: str) -> bytes:
    return hashlib.sha256(f"{seed}/{origin}".encode()).digest()


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, write the text, and print its facts. Return the exit code."""
    parser = Parser(prog="python benchmarks/prose.py", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0, metavar="X", help="size of the text (default 100)")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the Parquet file to write")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order and lengths (default 0)")
    parser.add_argument("--at-most", action="store_true", help="accept less text where the machine holds less")
    parsed = parser.parse_args(arguments)
    if not 0 < parsed.megabytes < float("inf"):
        parser.error(f"argument --megabytes: {parsed.megabytes} is not above 0")
    run = functools.partial(build, parsed.output, parsed.megabytes, seed=parsed.seed, at_most=parsed.at_most)
    return exit_code(lambda: print(table(run())), f"{parser.prog} --help")


if __name__ == "__main__":
    raise SystemExit(main())
