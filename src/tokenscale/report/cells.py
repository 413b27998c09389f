"""One row a run with its cell and its main measures: what two reports are compared by."""

from collections.abc import Callable

import duckdb
import pandas as pd

from tokenscale.analysis.queries import query

#: read here, in this order
QUERIES = ("inventory", "throughput", "validation", "stalls", "memory", "epochs", "computing")
#: query → its column → the measure's name, unit in the name
MEASURES = {
    "throughput": {"useful_tokens_per_s": "useful_tokens_per_s"},
    "validation": {"loss": "validation_loss"},
    "stalls": {"data_stall_share": "data_stall_share"},
    "memory": {"peak_bytes": "memory_peak_bytes"},
    "epochs": {"epoch_s": "epoch_s"},
    "computing": {"mfu_palm": "mfu"},
}
#: measures of which less is better
LESS_IS_BETTER = {"validation_loss", "data_stall_share", "memory_peak_bytes", "epoch_s"}
NAMES = [name for measures in MEASURES.values() for name in measures.values()]
IDENTITY = ("run_id", "cell", "series", "world_size", "repeat", "external", "validity", "seal")


def cells(connection: duckdb.DuckDBPyConnection) -> pd.DataFrame:
    """`gathered` of an experiment's tables."""
    return gathered(lambda name: query(name, connection))


def gathered(rows: Callable[[str], pd.DataFrame]) -> pd.DataFrame:
    """Rows of all runs that an experiment lists: `IDENTITY` and `NAMES`. What is not known of a run is null.

    `rows` gives those of a query. `validation_loss` is that of the last step, in nats a useful token; `mfu` is the
    share of the peak by the convention of PaLM (see `computing.sql`); the others are defined in the queries that
    `MEASURES` names.
    """
    found = rows("inventory")[list(IDENTITY)]
    for name, columns in MEASURES.items():
        measured = rows(name)
        if name == "validation":
            measured = measured[measured["last"].astype(bool)]
        measured = measured[["run_id", *columns]].rename(columns=columns)
        found = found.merge(measured.drop_duplicates("run_id", keep="last"), on="run_id", how="left")
    return found.astype({name: "float64" for name in NAMES})
