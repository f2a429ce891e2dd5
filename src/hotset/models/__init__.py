"""The seam into transformers: stock models with their experts taken out of the module tree."""
