"""The studies that this project grew from, by the numbers that experiments name them with."""

STUDIES = {
    "000": "Pretokenization and DDP on Alps (ETH Zürich, 2025)",
    "001": "the same project at an earlier date",
    "002": "Distributed Training Pipeline for Language Models, an overview without results",
    "003": "Distributed training and parallelism for GPT-2 (LLM Systems, 2025)",
    "004": "Distributed LLM Trainer, a learning project",
}
