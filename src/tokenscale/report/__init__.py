import os

# figures are drawn to files, and matplotlib, which the modules below import, may not know a
# notebook's back end
os.environ["MPLBACKEND"] = "agg"
