"""What a profile says of the configuration, and what of it a command line takes away."""

from pathlib import Path

import pytest

from tokenscale.base.errors import UserError
from tokenscale.settings import profile

ALPS = {"scale": "alps", "machine": "profiles/alps/machine.toml"}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


@pytest.mark.parametrize(
    "stated, argv, environment, found",
    [
        ({}, ["snakemake", "--profile", "alps", "runs"], {}, ALPS),
        ({}, ["snakemake", "--profile=profiles/alps"], {}, ALPS),
        ({}, ["snakemake", "--workflow-profile", "alps"], {}, ALPS),
        ({}, ["snakemake"], {"SNAKEMAKE_PROFILE": "alps"}, ALPS),
        ({}, ["snakemake", "--mode", "remote"], {profile.PROFILE_VARIABLE: "alps"}, ALPS),  # a job of such a call
        ({"scale": "demo"}, ["snakemake", "--profile", "alps"], {}, {"machine": ALPS["machine"]}),
        ({**ALPS, "corpus": "mine"}, ["snakemake", "--profile", "alps"], {}, {}),
        ({"corpus": "mine"}, ["snakemake", "--cores", "2"], {}, {}),
        ({}, ["snakemake", "--profile", "somebody-elses"], {}, {}),
        ({}, ["snakemake", "--profile"], {}, {}),
    ],
)
def test_what_a_command_line_left_out_of_its_profile_is_filled_in(stated, argv, environment, found):
    assert profile.find_dropped_values(stated, profile.find_profile(argv, environment)) == found


def test_jobs_find_the_profile_of_their_snakemake():
    environment = {}
    assert profile.parse_call(["snakemake", "--profile", "alps"], environment, [], {}).profile == "alps"
    assert environment == {profile.PROFILE_VARIABLE: "alps"}


@pytest.mark.parametrize("line", ["config: {scale: .inf}", "configfile: none.yaml", "config: 5", "jobs: 0100"])
def test_an_error_in_a_profile_is_not_taken_for_a_profile_from_elsewhere(tmp_path, monkeypatch, line):
    """Its scale and machine would be missing without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p/config.yaml").write_text(line)
    with pytest.raises(UserError) as error:
        profile.find_dropped_values({}, "p")
    assert error.value.facts["file"] in ("p/config.yaml", "none.yaml")
