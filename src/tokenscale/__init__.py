"""tokenscale: a laboratory for LLM pretraining systems, from raw Parquet to a report one can
defend.
"""

#: the one place that states it: `make generate` writes it into packages/golden and CITATION.cff
__version__ = "0.3.0"
