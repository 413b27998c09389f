"""The scales that experiments have settings for: a laptop, one box, a cluster."""

#: the scale of an experiment's own settings; those of every other scale are overlays in its file
BASE = "demo"
SCALES = (BASE, "workstation", "alps")
