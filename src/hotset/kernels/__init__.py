"""Every op twice: `reference` in plain torch is the specification, the Triton files are checked against it."""
