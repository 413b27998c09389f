"""Processes forked from one server that has imported what costs most: torch for ranks, Snakemake
and its plugins.

A worker of pytest has one such server, whoever asks first: so all that any test wants to find
imported is in one list.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preloaded"])
