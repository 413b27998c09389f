"""At the end: how many blocks of each document ran, ran as a dry run, or are listed as not run."""


def pytest_terminal_summary(terminalreporter):
    reports = [r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, [])]
    counted = [dict(r.user_properties) for r in reports if r.when == "call" and "blocks" in dict(r.user_properties)]
    if not counted:
        return
    terminalreporter.section("blocks of the documents")
    kinds = [*counted[0]["blocks"]]
    rows = [(found["documents"][0], found["seconds"], found["blocks"]) for found in counted]
    together = {kind: sum(counts[kind] for _, _, counts in rows) for kind in kinds}
    for name, seconds, counts in [*sorted(rows), ("together", sum(row[1] for row in rows), together)]:
        numbers = ", ".join(f"{counts[kind]:3} {kind}" for kind in kinds)
        terminalreporter.write_line(f"{name:32}{numbers}   {seconds:4.0f} s")
