"""tokenscale: a laboratory for LLM pretraining systems, from raw Parquet to a report one can
defend.
"""

__version__ = "0.2.0"
