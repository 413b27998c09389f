"""Prepare the corpus `debian` of config.yaml: prose, code and Japanese from packages of Debian.

    python config/corpora/debian/prepare.py results/sources/debian

downloads the packages in `PACKAGES` (240 MB) with `apt-get download`, so on Debian 12 or where its
sources are configured, and writes text-0.parquet to text-7.parquet (over 300 MB of text) and
packages.json. The versions are those of the published campaign; `--newest` takes those that the
sources have today, and packages.json names them.

A document is a section: of a manual by its headings, of code by its top-level definitions. Sections
are joined to at least 400 characters. Equal documents are kept once. Documents are in the order of
a hash, so that every part of the corpus is a fair sample of it.
"""

import argparse
import gzip
import hashlib
import html.parser
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

#: shorter sections are joined with the next one
LEAST_CHARACTERS = 400
FILES = 8
LINUX_FOLDERS = [
    "block",
    "crypto",
    "fs",
    "include",
    "kernel",
    "lib",
    "mm",
    "net",
    "security",
    "sound",
    "tools",
]


@dataclass(frozen=True)
class Package:
    """A package of Debian, its version in the published campaign, and the text that is read."""

    version: str
    kind: str  #: prose, code or japanese
    pattern: str  #: glob of the files below the package's root
    split: Callable[[str], Iterator[str]]


def split_at(pattern: str) -> Callable[[str], Iterator[str]]:
    """Return a function that splits text before each match of `pattern` at the start of a line."""
    begin = re.compile(pattern, re.MULTILINE)

    def split(text: str) -> Iterator[str]:
        starts = [0, *(match.start() for match in begin.finditer(text)), len(text)]
        for start, stop in zip(starts, starts[1:], strict=False):
            yield text[start:stop]

    return split


split_headings = split_at(r"^(?=[^\s.][^\n]*\n([=\-~^\"*#+])\1{3,}$)|^(?==+ \w)")
split_pod = split_at(r"^(?==head[1-4] )")
split_definitions = split_at(r"(?<=\n\n)(?=[^\s#}])")


def split_manual(text: str) -> Iterator[str]:
    """Yield the sections of a manual page, with the words of macros and without fonts."""
    lines = []
    for line in text.splitlines():
        if line.startswith((".SH", ".SS")):
            yield "\n".join(lines)
            lines = []
        if line.startswith(('.\\"', "'")):
            continue
        words = re.sub(r"^\.[A-Za-z]+ ?", "", line) if line.startswith(".") else line
        plain = re.sub(r"\\f(\(..|\[\w*\]|.)|\\&|\\s[-+]?\d", "", words)
        lines.append(plain.replace("\\-", "-").replace("\\e", "\\").replace("\\(aq", "'"))
    yield "\n".join(lines)


class SectionReader(html.parser.HTMLParser):
    """Collect the visible text of a page, a section for each heading."""

    HIDDEN = ("script", "style", "head", "nav")
    BLOCKS = ("p", "div", "li", "tr", "br", "pre", "dt", "dd", "table", "h5", "h6")

    def __init__(self) -> None:
        super().__init__()
        self.sections: list[list[str]] = [[]]
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.HIDDEN:
            self.hidden += 1
        elif tag in ("h1", "h2", "h3", "h4"):
            self.sections.append([])
        elif tag in self.BLOCKS:
            self.sections[-1].append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.HIDDEN:
            self.hidden = max(0, self.hidden - 1)
        elif tag in ("h1", "h2", "h3", "h4"):
            self.sections[-1].append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.sections[-1].append(data)


def split_page(text: str) -> Iterator[str]:
    """Yield the visible text of the sections of an HTML page."""
    reader = SectionReader()
    reader.feed(text)
    reader.close()
    for parts in reader.sections:
        yield re.sub(r"\n\s*\n\s*", "\n\n", "".join(parts))


#: Debian's name → what is read; linux-source-6.1 has its text in a tar file (`read_linux`)
PACKAGES = {
    "linux-doc-6.1": Package("6.1.192-3", "prose", "**/Documentation/**/*.gz", split_headings),
    "python3.11-doc": Package("3.11.2-6+deb12u9", "prose", "**/_sources/**/*.txt", split_headings),
    "git-doc": Package("1:2.39.5-0+deb12u3", "prose", "**/*.txt", split_headings),
    "debian-policy": Package("4.6.2.0", "prose", "**/*.txt", split_headings),
    "postgresql-doc-15": Package("15.20-0+deb12u1", "prose", "**/*.html", split_page),
    "sqlite3-doc": Package("3.40.1-2+deb12u2", "prose", "**/*.html", split_page),
    "debian-handbook": Package("11.20220922", "prose", "**/en-US/*.html", split_page),
    "perl-doc": Package("5.36.0-7+deb12u4", "prose", "**/*.pod", split_pod),
    "manpages": Package("6.03-2", "prose", "**/man/man*/*.gz", split_manual),
    "manpages-dev": Package("6.03-2", "prose", "**/man/man*/*.gz", split_manual),
    "linux-source-6.1": Package("6.1.192-3", "code", "", split_definitions),
    "libpython3.11-stdlib": Package("3.11.2-6+deb12u9", "code", "**/*.py", split_definitions),
    "python3-sympy": Package("1.11.1-1", "code", "**/*.py", split_definitions),
    "python3-django": Package("3:3.2.25-0+deb12u7", "code", "**/*.py", split_definitions),
    "libreoffice-help-ja": Package("4:7.4.7-1+deb12u14", "japanese", "**/ja/**/*.html", split_page),
    "debian-reference-ja": Package("2.100", "japanese", "**/*.html", split_page),
    "manpages-ja": Package(
        "0.5.0.0.20221215+dfsg-1", "japanese", "**/man/ja/**/*.gz", split_manual
    ),
    "manpages-ja-dev": Package(
        "0.5.0.0.20221215+dfsg-1", "japanese", "**/man/ja/**/*.gz", split_manual
    ),
}


def read_text(data: bytes) -> str | None:
    """Return the text of a file, or None where it is not UTF-8."""
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def read_linux(root: Path) -> Iterator[bytes]:
    """Yield the C files of some folders of Linux."""
    (archive,) = root.glob("usr/src/linux-source-*.tar.xz")
    with tarfile.open(archive, "r|xz") as tar:
        for member in tar:
            parts = member.name.split("/")
            wanted = parts[1:] and parts[1] in LINUX_FOLDERS and member.name.endswith((".c", ".h"))
            file = tar.extractfile(member) if wanted and member.isfile() else None
            if file is not None:
                yield file.read()


def read_files(root: Path, pattern: str) -> Iterator[bytes]:
    """Yield the content of a package's files, unpacked, in the order of their names."""
    for path in sorted(root.glob(pattern)):
        if path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            yield gzip.decompress(data) if path.suffix == ".gz" else data


def join_sections(sections: Iterator[str]) -> Iterator[str]:
    """Yield documents of at least LEAST_CHARACTERS, of whole sections in their order."""
    joined = ""
    for section in sections:
        joined += section
        if len(joined.strip()) >= LEAST_CHARACTERS:
            yield joined.strip()
            joined = ""
    if len(joined.strip()) >= LEAST_CHARACTERS // 4:
        yield joined.strip()


def read_package(name: str, root: Path) -> Iterator[str]:
    """Yield the documents of an unpacked package."""
    package = PACKAGES[name]
    files = read_files(root, package.pattern) if package.pattern else read_linux(root)
    for data in files:
        text = read_text(data)
        if text is not None and "\0" not in text:
            yield from join_sections(package.split(text))


def download(names: list[str], folder: Path) -> None:
    """Download packages, as `name` or `name=version`. Ends the program where apt-get fails."""
    done = subprocess.run(["apt-get", "download", *names], cwd=folder, check=False)
    if done.returncode:
        sys.exit(
            "prepare.py: apt-get did not download all packages.\n"
            "  next  apt-get update, or --newest for the versions that your sources have"
        )


def list_versions(folder: Path) -> dict[str, dict[str, str]]:
    """Return name → version, hash and file of the packages in a folder."""
    found = {}
    for path in sorted(folder.glob("*.deb")):
        command = ["dpkg-deb", "--show", "--showformat", "${Package} ${Version}", str(path)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        name, version = shown.split()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found[name] = {"version": version, "sha256": digest, "file": path.name}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newest", action="store_true")
    options = parser.parse_args()
    documents: dict[bytes, tuple[str, str, str]] = {}
    read = 0
    with tempfile.TemporaryDirectory() as temporary:
        debs = Path(temporary)
        pinned = [f"{name}={package.version}" for name, package in PACKAGES.items()]
        download(list(PACKAGES) if options.newest else pinned, folder=debs)
        versions = list_versions(debs)
        for name, package in PACKAGES.items():
            root = debs / name
            file = debs / versions[name].pop("file")
            subprocess.run(["dpkg-deb", "--extract", str(file), str(root)], check=True)
            for text in read_package(name, root=root):
                read += 1
                digest = hashlib.blake2b(text.encode()).digest()
                documents.setdefault(digest, (text, package.kind, name))
    options.folder.mkdir(parents=True, exist_ok=True)
    ordered = [documents[digest] for digest in sorted(documents)]
    for number in range(FILES):
        rows = ordered[number * len(ordered) // FILES : (number + 1) * len(ordered) // FILES]
        columns = dict(zip(("text", "kind", "package"), zip(*rows, strict=True), strict=True))
        table = pa.table({column: list(values) for column, values in columns.items()})
        pq.write_table(
            table,
            options.folder / f"text-{number}.parquet",
            compression="zstd",
            row_group_size=2000,
        )
    kinds = sorted({kind for _, kind, _ in ordered})
    sizes = {
        kind: sum(len(text.encode()) for text, found, _ in ordered if found == kind)
        for kind in kinds
    }
    counts = {kind: sum(found == kind for _, found, _ in ordered) for kind in kinds}
    card = {
        "packages": versions,
        "documents": counts,
        "bytes": sizes,
        "duplicates": read - len(ordered),
    }
    (options.folder / "packages.json").write_text(json.dumps(card, indent=1) + "\n")
    print(json.dumps({key: card[key] for key in ("documents", "bytes", "duplicates")}, indent=1))


if __name__ == "__main__":
    main()
