"""The `headgate` console script: one module per group of verbs, each imported only when its verb runs."""
