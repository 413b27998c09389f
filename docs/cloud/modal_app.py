"""One experiment on a rented machine by Modal, after `tokenscale cloud` has staged it
(docs/clusters.md).

    modal secret create tokenscale-bucket AWS_ACCESS_KEY_ID=… \\
        AWS_SECRET_ACCESS_KEY=… AWS_DEFAULT_REGION=…
    GPU=H100:4 modal run docs/cloud/modal_app.py --bucket s3://BUCKET/PREFIX \\
        --experiment demo --ranks 4
"""

import os
import subprocess
import sys
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[2]
app = modal.App("tokenscale")
image = (
    modal.Image.debian_slim(python_version="3.12")
    .pip_install_from_pyproject(str(ROOT / "pyproject.toml"), optional_dependencies=["cloud"])
    .env({"PYTHONPATH": "/project/src"})
    .add_local_dir(ROOT / "src", "/project/src", ignore=["**/__pycache__", "**/*.egg-info"])
)


@app.function(
    image=image,
    gpu=os.environ.get("GPU", "H100"),  # KIND or KIND:NUMBER, of one machine
    secrets=[modal.Secret.from_name("tokenscale-bucket")],
    timeout=24 * 3600,
    # after a lost machine or a failed run, the next worker continues from the bucket
    retries=10,
)
def train(bucket: str, experiment: str, ranks: int) -> None:
    """Train the staged runs in an empty folder. Raises CalledProcessError if a run did not
    complete.
    """
    command = ["cloud", "--bucket", bucket, experiment, "--ranks", str(ranks), "--worker"]
    subprocess.run([sys.executable, "-m", "tokenscale", *command], check=True)


@app.local_entrypoint()
def main(bucket: str, experiment: str, ranks: int = 1) -> None:
    """Rent the machine and wait until the experiment ends."""
    train.remote(bucket, experiment, ranks)
