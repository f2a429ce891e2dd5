"""Every op twice: `reference` in plain torch is the specification; Triton is checked against it."""
