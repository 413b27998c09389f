import os

# figures are drawn to files; a notebook's back end may be unknown to this matplotlib
os.environ["MPLBACKEND"] = "agg"
