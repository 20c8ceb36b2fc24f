"""Cost models: what a step of work takes, by data sheet, by measurement, or as the papers count."""
