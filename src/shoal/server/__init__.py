"""The process that reduces for the workers of jobs: `shoal server`."""
