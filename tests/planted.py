"""Secrets as environments hold them, planted so that tests can look for them where they must not
be.
"""

VALUE = "planted-7f3a91"
NAMES = (
    *(
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WANDB_API_KEY",
        "PASSWORD",
        "GITHUB_TOKEN",
    ),
    *(
        "HF_PASSWORD",
        "HF_SECRET",
        "NCCL_AUTH",
        "FI_PASSWORD",
        "SLURM_JWT",
        "MLFLOW_TRACKING_TOKEN",
        "TORCH_API_KEY",
    ),
    "GLOO_CREDENTIALS",
)
#: passwords in addresses
ADDRESSES = ("HTTPS_PROXY", "HTTP_PROXY", "NCCL_SOCKET", "RANK_URL")
SECRETS = dict.fromkeys(NAMES, VALUE) | dict.fromkeys(ADDRESSES, f"http://me:{VALUE}@host:3128/")
#: with them, and still with a way to this machine's own servers
ENVIRONMENT = SECRETS | {"no_proxy": "127.0.0.1,localhost", "NCCL_DEBUG": "INFO"}
