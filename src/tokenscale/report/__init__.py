import os

os.environ["MPLBACKEND"] = "agg"  # figures are files; a notebook's back end may be unknown here
