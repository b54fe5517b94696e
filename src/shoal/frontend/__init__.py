"""The frameworks that shoal serves, one package each; only these import their framework."""
