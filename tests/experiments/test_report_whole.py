"""The whole report at once: the bytes of the single commands, and what is refused."""

import shutil
from pathlib import Path

import pytest

from tests import logs
from tokenscale.analysis.ingest import ingest
from tokenscale.base.errors import UserError
from tokenscale.base.files import sha256_file
from tokenscale.cli.main import main
from tokenscale.report import build, save

pytestmark = [pytest.mark.experiment, pytest.mark.slow(20)]

ROOT = Path(__file__).parents[2]
FIGURE = "data_stall_share"
NAMES = ["demo", "second"]
COPIED = {"workflow": ROOT / "workflow/Snakefile", "citation": ROOT / "CITATION.cff"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Tables of two small experiments. Nobody may change them."""
    folder = tmp_path_factory.mktemp("whole")
    for name, approaches in zip(NAMES, [("padded", "packed"), ("packed", "token-list")], strict=True):
        options = {"world_sizes": (1,), "repeats": 2, "approaches": approaches, "figures": [FIGURE]}
        table = logs.write_demo(folder / name, **options)
        ingest(table, folder / name / "runs", folder / "tables" / name)
    return folder / "tables"


def write(tables, output, *names, **options):
    return build.write(names, tables, output / "figures", output / "report", **options)


def hashes(folder):
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def by_single_verbs(tables, output, ledger):
    """As the rules call them."""
    report, of = output / "report", ["--experiments", *NAMES]
    copied = [word for name, path in COPIED.items() for word in (f"--{name}", str(path))]
    places = ["--tables", str(tables), "--figures", str(output / "figures")]
    judged = [report / "claims.json", report / "claims.tex"]
    claims, also = ["--claims", str(judged[0])], [*(report / f"{name}.html" for name in NAMES), *judged]
    assert main(["claims", "--ledger", ledger, "--tables", str(tables), "--output", str(report), *of]) == 0
    for name, path in zip(NAMES, also, strict=False):
        target = str(output / "figures" / name / FIGURE)
        assert main(["report", "figure", FIGURE, "--tables", str(tables / name), "--output", target]) == 0
        assert main(["report", "page", "--of-several", "--experiments", name, *places, "--output", str(path)]) == 0
    for part, file in (("page", "index.html"), ("pdf", "report.pdf")):
        assert main(["report", part, *places, *claims, "--output", str(report / file), *of]) == 0
    places += ["--output", str(report), "--ledger", ledger, *copied, "--also", *map(str, also)]
    assert main(["report", "bundle", *places, *of]) == 0


def test_it_is_what_the_single_verbs_make(tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Path(shutil.copy(ROOT / "config/claims.yaml", tmp_path / "claims.yaml"))
    made = write(tables, tmp_path / "one", *NAMES, ledger=ledger, **COPIED)
    assert {tmp_path / "one" / "report" / name for name in ("index.html", "report.pdf", "SHA256SUMS")} <= {*made}
    by_single_verbs(tables, tmp_path / "single", str(ledger))
    found = hashes(tmp_path / "one")
    assert found == hashes(tmp_path / "single")
    assert {"figures/second/data_stall_share.pdf", "report/claims.tex", "report/second.html"} <= set(found)


def test_one_experiment_is_shown_on_the_first_page(tables, tmp_path, capsys):
    one, single = tmp_path / "one", tmp_path / "single.html"
    write(tables, one, "demo")
    places = ["--tables", str(tables), "--figures", str(one / "figures"), "--output", str(single)]
    assert main(["report", "page", *places, "--experiments", "demo"]) == 0
    path, answers, *cautions = capsys.readouterr().out.splitlines()
    assert path == str(single) and answers.startswith("answers ") and 0 < len(cautions) <= 7
    assert sha256_file(one / "report" / "index.html") == sha256_file(single)
    assert not list(one.rglob("claims.*")) and not list(one.rglob("demo.html"))
    assert main(["report", "page", "--of-several", *places, "--experiments", *NAMES]) == 2


def test_a_query_is_run_once_for_all_figures(tables, monkeypatch):
    with save.Tables(tables / "demo") as opened:
        rows = opened.rows("stalls")
        monkeypatch.setattr(save, "query", lambda *_: pytest.fail("queried again"))
        assert opened.rows("stalls") is rows


def test_no_figure_is_drawn_twice(tables, tmp_path, monkeypatch):
    drawn, draw = [], save.draw
    monkeypatch.setattr(
        save, "draw", lambda made, *rest, **options: drawn.append(made.name) or draw(made, *rest, **options)
    )
    write(tables, tmp_path, *NAMES)
    assert drawn == [FIGURE, FIGURE]


@pytest.mark.parametrize(
    ("names", "said"),
    [(["demo", "demo"], "named twice"), (["demo", "nobody"], "no tables in this folder")],
)
def test_what_cannot_be_made_is_refused_before_anything_is_written(tables, tmp_path, names, said):
    with pytest.raises(UserError, match=said):
        write(tables, tmp_path / "out", *names)
    assert not (tmp_path / "out").exists()
