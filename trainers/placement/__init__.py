"""Where the parts of a run are placed on a Ray cluster."""
