"""A script in the drawing of a figure: `verify` names it, no report reads it, no page runs it
though its hash fits.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tokenscale.base.errors import UserError
from tokenscale.base.files import read_json, sha256_file, write_sealed
from tokenscale.cli.verify import verify_results
from tokenscale.report import page, summary

FIGURE = "loss_over_time"
MARK = "it-ran"
SCRIPTS = [
    f"<script>document.title = '{MARK}'</script>",
    f'<image href="x:" onerror="document.title = \'{MARK}\'"/>',
    (
        '<foreignObject><b tabindex="0" autofocus="" onfocus="document.title = '
        f"'{MARK}'\">x</b></foreignObject>"
    ),
]
POLICY = re.compile('<meta http-equiv="Content-Security-Policy".*?>')


def shown(path: Path, folder: Path) -> str:
    """What a browser makes of a page; its scripts have run."""
    argv = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder}",
        "--dump-dom",
    ]
    done = subprocess.run([*argv, f"file://{path}"], capture_output=True, text=True, timeout=60)
    assert "</html>" in done.stdout, done.stderr
    return re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)[1]


@pytest.fixture
def results(stages, tmp_path) -> Path:
    return Path(
        shutil.copytree(stages.folder / "end/project/results", tmp_path / "results", symlinks=True)
    )


def plant(figure: Path, script: str) -> None:
    figure.write_text(figure.read_text().replace("</svg>", f"{script}</svg>"))


@pytest.mark.parametrize("place", ["figures/ways", "report/figures/ways"])
def test_a_drawing_with_a_script_is_named_and_not_read(results, place):
    plant(results / place / f"{FIGURE}.svg", SCRIPTS[0])
    found = [str(finding) for finding in verify_results(results)[0] if not finding.note]
    assert any(f"{FIGURE}.svg" in text for text in found), found
    if place == "figures/ways":
        with pytest.raises(UserError, match="not the one that was drawn"):
            page.figure(FIGURE, results / place, "x")


FOREIGN = [
    *SCRIPTS,
    '</svg><meta http-equiv="refresh" content="0;url=evil.html"/><svg>',
    '<a href="https://example.org"><text>more</text></a>',
    '<use href="https://example.org/x.svg#a"/>',
    '<image href="javascript:document.title"/>',
    '<g onload="document.title"/>',
    '<animate attributeName="href" values="javascript:x"/>',
    "<?xml-stylesheet href='x'?>",
    "<![CDATA[<b>]]>",
    "<g>",
]


@pytest.mark.parametrize("content", FOREIGN)
def test_no_page_takes_a_drawing_of_others_whose_hash_was_put_right(content, results, tmp_path):
    drawing = results / f"figures/ways/{FIGURE}.svg"
    plant(drawing, content)
    record = read_json(drawing.with_suffix(".json"))
    record["files"]["svg"] = sha256_file(drawing)
    write_sealed(drawing.with_suffix(".json"), record)
    with pytest.raises(UserError, match="none of this project's") as caught:
        page.figure(FIGURE, results / "figures/ways", "x")
    assert caught.value.facts["path"] == str(drawing)


def test_the_policy_of_a_page_stops_scripts_that_get_into_it(results, tmp_path):
    if shutil.which("chromium") is None:
        pytest.skip("no browser")
    written = tmp_path / "index.html"
    part = summary.experiment("ways", results / "tables")
    page.write([part], results / "figures", written)
    text = written.read_text().replace("</svg>", f"{''.join(SCRIPTS)}</svg>", 1)
    written.write_text(text)
    assert shown(written, tmp_path / "browser") != MARK
    (tmp_path / "open.html").write_text(POLICY.sub("", text))
    assert shown(tmp_path / "open.html", tmp_path / "browser") == MARK, "the browser would run it"
