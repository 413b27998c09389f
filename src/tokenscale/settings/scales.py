"""The scales that experiments have overlays for: a laptop, one box, a cluster."""

SCALES = ("demo", "workstation", "alps")
