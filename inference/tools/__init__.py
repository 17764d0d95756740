"""Developer tools: training of the demo models, generated references."""
