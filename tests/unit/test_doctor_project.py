"""What `doctor` says of the project's folder and its configuration."""

from tests.machines import asked
from tokenscale.cli import doctor_checks


def test_outside_of_the_project_there_is_no_demo(monkeypatch, tmp_path):
    assert doctor_checks.check_project_folder(asked()).verdict in ("ok", "note")
    monkeypatch.chdir(tmp_path)
    found = doctor_checks.check_project_folder(asked())
    assert found.verdict == "no" and "workflow/Snakefile" in found.fact
    assert doctor_checks.check_configuration(asked()).values == {"without": "project"}


def test_a_download_without_links_is_told(monkeypatch, tmp_path):
    for name in ("workflow/Snakefile", "config/config.yaml", "profiles/default/config.yaml", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "alps").write_text("profiles/alps")  # what Git makes of a link where links are not supported
    monkeypatch.chdir(tmp_path)
    assert doctor_checks.check_project_folder(asked()).verdict == "note"


def test_a_mistake_in_the_configuration_is_told_as_the_workflow_tells_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.yaml").write_text("scale: dmeo\n")
    found = doctor_checks.check_configuration(asked())
    assert found.verdict == "no" and "unknown scale 'dmeo'" in found.fact and "demo" in found.next
