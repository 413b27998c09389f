"""Profiles: machines, the container of Alps with its image, what users copy, what a command line
takes away.
"""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tokenscale.base.errors import UserError
from tokenscale.runs.launch import start
from tokenscale.runs.records import provenance
from tokenscale.settings import machine, profile
from tokenscale.settings.config import load_config
from tokenscale.settings.layout import geometry

ROOT = Path(__file__).parents[2]
ALPS = ROOT / "profiles/alps"
#: what CSCS sets at login
OF_THE_SITE = {"SCRATCH", "HOME", "USER"}
#: variables of the container that change no number: where kernels are kept, what PMIx says
SILENT = {"TRITON_CACHE_DIR", "PMIX_MCA_psec"}


@pytest.fixture(scope="module")
def container():
    return tomllib.loads((ALPS / "train.toml").read_text())


@pytest.fixture(scope="module")
def exported():
    alps = machine.load_machine(ALPS / "machine.toml")
    return start.srun_environment(
        alps, outputs=Path("o"), root=Path("/p"), address="10.0.0.1", job="7"
    )


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("profiles/*/machine.toml")), ids=lambda path: path.parent.name
)
def test_every_machine_is_understood(file):
    found = machine.load_machine(file)
    assert found.name == file.parent.name
    assert found.container is None or (ROOT / found.container).is_file()
    stated = dict(
        item.split("=")
        for item in yaml.safe_load((file.parent / "config.yaml").read_text())["config"]
    )
    assert stated["machine"] == str(file.relative_to(ROOT)), "a profile names its own machine"


# -- the container


def test_paths_of_the_container_begin_with_what_the_launcher_or_the_site_exports(
    container, exported
):
    texts = [container["workdir"], *container["mounts"]]
    used = {name for text in texts for name in re.findall(r"\$\{(\w+)\}", text)}
    assert used <= {*exported, *OF_THE_SITE}
    assert not any(re.search(r"\$(?!\{\w+\})", text) for text in texts)  # expanded in braces alone
    assert all(text.startswith(("/", "${")) for text in texts)


def test_a_rank_begins_in_the_project_and_sees_it_where_it_is(container, exported):
    assert container["workdir"] == "${TOKENSCALE_ROOT}" and exported["TOKENSCALE_ROOT"] == "/p"
    assert "${TOKENSCALE_ROOT}:${TOKENSCALE_ROOT}" in container["mounts"]
    # links lead where they lead outside
    assert all(len(set(mount.split(":"))) == 1 for mount in container["mounts"])


def test_variables_of_the_container_are_in_a_runs_record_and_none_is_the_launchers(
    container, exported, monkeypatch
):
    """What the container's file says wins: the launcher would be silently overruled."""
    assert not set(container["env"]) & set(exported)
    for name, value in container["env"].items():
        monkeypatch.setenv(name, value)
    assert "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE" in container["env"]
    assert all(isinstance(value, str) for value in container["env"].values())
    assert set(container["env"]) - set(provenance.allowed_environment()) == SILENT


# -- its image


def test_the_image_is_cscs_own_as_its_page_says_it_is_used(container):
    """docs/software/alps-extended-images.md of eth-cscs/cscs-docs: its box of dangers."""
    (base,) = re.findall(
        r'^container: "docker://.+/(\w+):(.+)"$',
        (ROOT / "workflow/Snakefile").read_text(),
        re.MULTILINE,
    )
    name, _, tag = container["image"].rpartition("/")[2].partition(":")
    assert (name, tag.rpartition("-alps")[0]) == (f"ngc-{base[0]}", base[1])
    assert not tag.endswith("-dev"), "a tag that may change names no image"
    assert container["entrypoint"] is True
    assert container["annotations"] == {"com": {"hooks": {"cxi": {"enabled": "false"}}}}
    alps = machine.load_machine(ALPS / "machine.toml")
    assert alps.srun_options == ("--network=disable_rdzv_get",)
    assert alps.network == "AWS Libfabric"
    tuned = [name for name in container["env"] if name.startswith(("NCCL_", "FI_"))]
    assert not tuned, "they would win over the image's own"


def test_the_next_container_engine_finds_no_file_path_and_no_implicit_mount(container):
    """Sarus Suite: registry references, explicit destinations, no SquashFS, and --edf."""
    assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+:[\w.-]+", container["image"])
    assert all(re.fullmatch(r"[^:]+:[^:]+", mount) for mount in container["mounts"])
    alps = replace(machine.load_machine(ALPS / "machine.toml"), container_option="edf")
    words = start.build_argv(alps, ["benchmark"], ROOT)
    assert f"--edf={ALPS / 'train.toml'}" in words


# -- what users copy


@pytest.mark.parametrize("readme", ["docs/clusters.md", "profiles/alps/README.md"])
def test_a_profile_that_is_made_as_a_readme_says_is_one(readme, tmp_path):
    blocks = re.findall(
        r"```\w+\n(# profiles/mine/([\w.]+)\n.+?)```", (ROOT / readme).read_text(), re.DOTALL
    )
    files = {name: text for text, name in blocks}
    ours = yaml.safe_load((ALPS / "config.yaml").read_text())
    changed = yaml.safe_load(files["config.yaml"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.yaml").write_text(yaml.safe_dump(ours | changed))
    values = profile.load_profile_config("mine", tmp_path)
    assert values["machine"] == "profiles/mine/machine.toml" and values["scale"] in ("demo", "alps")
    for name in ("default-resources", "set-threads"):  # what replaces a map has all of it
        # a feature of Alps
        assert set(changed.get(name, ours[name])) >= set(ours[name]) - {"constraint"}
    lines = tomllib.loads(files["machine.toml"])
    stated = (
        lines if "name" in lines else tomllib.loads((ALPS / "machine.toml").read_text()) | lines
    )
    flat = {key: value for key, value in stated.items() if key != "environment"}
    (tmp_path / "machine.toml").write_text(
        "\n".join(f"{key} = {json.dumps(value)}" for key, value in flat.items())
    )
    found = machine.load_machine(tmp_path / "machine.toml")
    assert found.starter == "srun" and found.name == ("mine" if "name" in lines else "alps")


def test_the_debug_profile_is_that_of_alps_within_the_partitions_limits():
    """4 nodes for as long as one job may have them; one node, for rules that ask for longer."""
    folders = (ALPS, ROOT / "profiles/alps-debug")
    alps, debug = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders)
    machines = [machine.load_machine(folder / "machine.toml") for folder in folders]
    own = {key: getattr(machines[0], key) for key in ("name", "minutes", "signal_s")}
    assert replace(machines[1], **own) == machines[0] and machines[1].minutes == 20 <= 90 / 4
    own = {"jobs": 1, "config": debug["config"]}
    own["default-resources"] = alps["default-resources"] | {
        "slurm_partition": "debug",
        "runtime": 20,
    }
    assert {key: value for key, value in debug.items() if key != "set-resources"} == alps | own
    rules = "".join(file.read_text() for file in (ROOT / "workflow/rules").glob("*.smk"))
    long = {
        name
        for name, text in re.findall(
            r"^rule (\w+):\n(.*?)(?=^\S|\Z)", rules, re.MULTILINE | re.DOTALL
        )
        if int((re.findall(r"runtime=(\d+)", text) or [0])[0]) > 90
    }
    assert long and {name: {"runtime": 60} for name in long} == debug["set-resources"]


def test_the_first_run_crosses_nodes_within_what_debug_allows_a_job(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(profile="profiles/alps-debug")
    (name,) = config.select_experiments(())
    shapes = [
        geometry(run.settings.layout.world_size, config.machine.gpus_per_node)
        for run in config.runs(name)
    ]
    assert {(shape.nodes, shape.ranks_per_node) for shape in shapes} == {(1, 1), (1, 4), (2, 4)}
    assert all(run.settings.device == "auto" for run in config.runs(name))
    assert max(shape.nodes for shape in shapes) * config.machine.minutes <= 90


MAPS = {
    "default-resources": {"slurm_account": "$A", "runtime": 5},
    "set-resources": {"train": {"mem_mb": 7, "runtime": 5}, "pretokenize": {"mem_mb": 7}},
    "set-threads": ["train=2", "pretokenize=2"],
}


@pytest.mark.parametrize(
    "used, lost",
    [
        ({}, {}),
        ({"default-resources": {"runtime": 9}}, {"default-resources": ["slurm_account"]}),
        ({"default-resources": {"runtime": 9, "slurm_account": "g1", "gpu": 1}}, {}),
        ({"set-resources": {"train": {"runtime": 9}}}, {"set-resources": ["train:mem_mb"]}),
        ({"set-threads": {"pretokenize": 1}}, {"set-threads": ["train"]}),
        ({"set-threads": {"train": 1}}, {}),  # of the rules that are submitted
    ],
)
@pytest.mark.parametrize("named", ["option", "joined", "variable", "nobody", "elsewhere"])
def test_what_an_option_took_away_from_the_profile_is_known(
    used, lost, named, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles/p").mkdir(parents=True)
    (tmp_path / "profiles/p/config.yaml").write_text(yaml.safe_dump(MAPS))
    argv = {
        "option": ["--profile", "p"],
        "joined": ["--profile=profiles/p"],
        "elsewhere": ["--profile", "q"],
    }
    environment = {"SNAKEMAKE_PROFILE": "profiles/p"} if named == "variable" else {}
    given = profile.find_profile(["snakemake", *argv.get(named, []), "-n"], environment)
    found = profile.find_replaced_entries({**MAPS, **used}, {"train"}, given)
    assert found == ({} if named in ("nobody", "elsewhere") else lost)


# -- what a command line leaves out

OF_ALPS = {"scale": "alps", "machine": "profiles/alps/machine.toml"}


@pytest.mark.parametrize(
    "stated, argv, environment, found",
    [
        ({}, ["snakemake", "--profile", "alps", "runs"], {}, OF_ALPS),
        ({}, ["snakemake", "--profile=profiles/alps"], {}, OF_ALPS),
        ({}, ["snakemake", "--workflow-profile", "alps"], {}, OF_ALPS),
        ({}, ["snakemake"], {"SNAKEMAKE_PROFILE": "alps"}, OF_ALPS),
        # a job of such a call
        ({}, ["snakemake", "--mode", "remote"], {profile.PROFILE_VARIABLE: "alps"}, OF_ALPS),
        (
            {"scale": "demo"},
            ["snakemake", "--profile", "alps"],
            {},
            {"machine": OF_ALPS["machine"]},
        ),
        ({**OF_ALPS, "corpus": "mine"}, ["snakemake", "--profile", "alps"], {}, {}),
        ({"corpus": "mine"}, ["snakemake", "--cores", "2"], {}, {}),
        ({}, ["snakemake", "--profile", "somebody-elses"], {}, {}),
        ({}, ["snakemake", "--profile"], {}, {}),
    ],
)
def test_what_a_command_line_left_out_of_its_profile_is_filled_in(
    stated, argv, environment, found, monkeypatch
):
    monkeypatch.chdir(ROOT)
    assert profile.find_dropped_values(stated, profile.find_profile(argv, environment)) == found


def test_jobs_find_the_profile_of_their_snakemake(monkeypatch):
    monkeypatch.chdir(ROOT)
    environment = {}
    assert (
        profile.parse_call(["snakemake", "--profile", "alps"], environment, [], {}).profile
        == "alps"
    )
    assert environment == {profile.PROFILE_VARIABLE: "alps"}


@pytest.mark.parametrize(
    "line", ["config: {scale: .inf}", "configfile: none.yaml", "config: 5", "jobs: 0100"]
)
def test_an_error_in_a_profile_is_not_taken_for_a_profile_from_elsewhere(
    tmp_path, monkeypatch, line
):
    """Its scale and machine would be missing without a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p").mkdir()
    (tmp_path / "p/config.yaml").write_text(line)
    with pytest.raises(UserError) as error:
        profile.find_dropped_values({}, "p")
    assert error.value.facts["file"] in ("p/config.yaml", "none.yaml")
