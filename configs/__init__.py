"""One file for each recipe or table row: `get_config()` returns an ml_collections ConfigDict."""
