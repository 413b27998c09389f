"""What the server of forks.py has imported: packages only, since a copied project runs its own
tokenscale.
"""
# ruff: noqa: F401

import gc
import weakref

import awkward  # gigatoken imports it when first used
import docutils.core
import duckdb
import jinja2
import matplotlib.backends.backend_pdf
import matplotlib.backends.backend_svg
import matplotlib.figure
import numpy
import pandas
import pyarrow.parquet
import pydantic
import pypdf
import pytest
import safetensors
import smart_open
import tokenizers
import torch
import torch._dynamo  # DDP and every optimizer import it when first used: seconds for each rank
import torch.distributed.fsdp
import torch.nn.parallel
import yaml
import yte
from snakemake.cli import get_argument_parser

get_argument_parser()  # finds and imports Snakemake's plugins
for finalizer in [*weakref.finalize._registry]:
    finalizer.atexit = False  # torch's, of each of its operators: at the end of each job
gc.collect()
gc.freeze()  # what is here stays: no fork searches it for garbage, a third of a dry run's time
