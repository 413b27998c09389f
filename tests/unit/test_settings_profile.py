"""What a profile says of the configuration, and what of it a command line takes away."""

from pathlib import Path

import pytest

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
    assert profile.find_dropped_values(stated, argv, environment) == found


def test_jobs_find_the_profile_of_their_snakemake():
    environment = {}
    profile.find_dropped_values({}, ["snakemake", "--profile", "alps"], environment)
    assert environment == {profile.PROFILE_VARIABLE: "alps"}
