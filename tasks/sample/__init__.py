"""Sample raw data for each benchmark, made from one seed in the real layouts."""
